"""Prints which values the loops of a Gluon kernel lose on their way through Triton's inliner.

`python gluon_carried.py MODULE KERNEL JSON`: JSON maps arguments to the types or constants they
are compiled for, on sm_90; no GPU is needed, and TRITON_INTERPRET must not be set.

Triton's clean-up of loops takes a value that is carried from step to step for dead where nothing
uses it but the bounds of a loop inside: every step then has the first one's. The loop yields its
own argument after that, which is what is looked for.
"""

from __future__ import annotations

import importlib
import json
import re
import sys

from triton._C.libtriton import ir, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource


def inlined(kernel, arguments: dict[str, str | int | bool]) -> str:
    """Return the kernel's text once functions are inlined."""
    signature = {n: x if isinstance(x, str) else "constexpr" for n, x in arguments.items()}
    constants = {n: x for n, x in arguments.items() if not isinstance(x, str)}
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    source = GluonASTSource(kernel, {n: signature[n] for n in kernel.arg_names}, constants)
    options = backend.parse_options({"num_warps": 4} | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    manager = ir.pass_manager(context)
    passes.gluon.add_inliner(manager)
    manager.run(module, "inline")
    return str(module)


def lost(text: str) -> list[str]:
    """Name the arguments that a loop uses and yields to itself."""
    names = []
    for loop in re.finditer(
        r"^( *)%\S+ = scf\.for .* iter_args\((.*?)\) -> .*", text, re.MULTILINE
    ):
        indent, carried = loop.groups()
        passed = re.compile(rf"^{indent}  scf\.yield (.*?) :", re.MULTILINE).search(
            text, loop.end()
        )
        assert passed, loop.group()
        body = text[loop.end() : passed.start()]
        arguments = [x.split(" = ")[0].strip() for x in carried.split(",")]
        yielded = [x.strip() for x in passed.group(1).split(",")]
        for a, b in zip(arguments, yielded, strict=True):
            if a == b and re.search(re.escape(a) + r"\b", body):
                names.append(a)
    return names


if __name__ == "__main__":
    module, kernel, arguments = sys.argv[1:]
    text = inlined(getattr(importlib.import_module(module), kernel), json.loads(arguments))
    assert "scf.for" in text
    sys.stdout.write(json.dumps(lost(text)))

"""What a store was made from, in three kinds of field, and how two of them are compared.

*target* fields decide what a state means, *store* fields how it is written, *plan* fields which
samples stand where. Resume needs all three to agree, an append target and store, a mix target only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_offline.common.errors import BadInput

Scalar = str | int | float | bool | None
RESUME = ("target", "store", "plan")
APPEND = ("target", "store")
MIX = ("target",)

_REMEDY = {
    "target": "use the same target, layers and chat options, or another --out",
    "store": "use the same option, or another --out",
    "plan": "use the same option, add --append for more data, or use another --out",
}
_MIX_REMEDY = (
    "mix stores of one target, layers and chat options; dflash-cache copy --layers drops layers"
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Flat field-to-scalar mappings; see the module docstring for the kinds."""

    target: dict[str, Scalar] = field(default_factory=dict)
    store: dict[str, Scalar] = field(default_factory=dict)
    plan: dict[str, Scalar] = field(default_factory=dict)

    def as_dict(self) -> dict[str, dict[str, Scalar]]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Identity":
        """Read what `as_dict` wrote."""
        return cls(**data)


def differing(a: Mapping[str, Scalar], b: Mapping[str, Scalar]) -> list[str]:
    """Return the names of fields that differ; one without a value is as if it were not there."""
    return [name for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def compare(stored: Identity, given: Identity, *, kinds: Iterable[str], where: str) -> None:
    """Refuse a difference in the fields of `kinds`.

    Raises:
        BadInput: names every field that differs, with both values, and the remedy.
    """
    for kind in kinds:
        a, b = getattr(stored, kind), getattr(given, kind)
        different = [
            f"{name} is {_show(b.get(name))} but {where} has {_show(a.get(name))}"
            for name in differing(a, b)
        ]
        if different:
            remedy = _MIX_REMEDY if kinds == MIX else _REMEDY[kind]
            raise BadInput(f"{'; '.join(different)}: {remedy}")


def known_part(fields: Mapping[str, Scalar], known: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return those of `fields` that `known` has too."""
    return {name: value for name, value in fields.items() if name in known}


def _show(value: Scalar) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

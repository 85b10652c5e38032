"""Which target and chat options a drafter was trained for, and whether others are the same.

A drafter folder may carry `identity.json`; otherwise the run it lies in names its stores, and a
store that is still there says what it was made from.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dflash_offline.common.blobs import blobs_at
from dflash_offline.common.errors import BadInput
from dflash_offline.common.identity import Scalar
from dflash_offline.common.store import read_header

IDENTITY_NAME = "identity.json"
_RUN_CONFIG = "config.yaml"
# What makes the same conversation the same tokens. Weights may differ on purpose: a fine-tuned
# target, or the same one in another file format.
_MUST_AGREE = {
    "chat_template_sha256": "--chat-template",
    "chat_template_args": "--chat-template-arg",
    "system_prompt": "--system-prompt",
}
_SHOULD_AGREE = {
    "weight_digest": "weights",
    "tokenizer_sha256": "tokenizer files",
}


def save_identity(folder: Path, target: Mapping[str, Scalar]) -> None:
    """Write the target fields of a store's identity beside an exported drafter."""
    text = json.dumps(dict(target), indent=2, sort_keys=True)
    (folder / IDENTITY_NAME).write_text(text + "\n", encoding="utf-8")


def drafter_identity(folder: Path) -> dict[str, Scalar] | None:
    """Return the target fields of the identity a drafter was trained under, None if unknown.

    Args:
        folder: an exported drafter, in a run (`draft`, `checkpoints/step-n`) or copied elsewhere.

    Raises:
        BadInput: `identity.json` is there and cannot be read.
    """
    path = folder / IDENTITY_NAME
    if path.is_file():
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise BadInput(f"{path} is not JSON ({problem}); export the drafter again") from problem
        return dict(fields)
    for parent in folder.resolve().parents[:2]:
        if (parent / _RUN_CONFIG).is_file():
            return _from_run(parent / _RUN_CONFIG)
    return None


def check_same_target(
    drafter: Mapping[str, Scalar] | None, given: Mapping[str, Scalar], *, where: str
) -> None:
    """Refuse chat options that are not those of the drafter's training data.

    Fields that one side lacks are not compared: data may have come as token ids.

    Raises:
        BadInput: names the option and both values.
    """
    for name, spelling in _MUST_AGREE.items():
        if drafter is None or name not in drafter or name not in given:
            continue
        if drafter[name] != given[name]:
            raise BadInput(
                f"{spelling}: {where} has {name} {given[name]!r}, but the drafter was trained on "
                f"data with {drafter[name]!r}; give the same chat options as to dflash-extract"
            )


def notes_on_target(drafter: Mapping[str, Scalar] | None, given: Mapping[str, Scalar]) -> list[str]:
    """Return one line for each thing about the target that is not as the drafter knew it."""
    if drafter is None:
        return ["the drafter does not say which target and chat options it was trained for"]
    return [
        f"the target's {what} are not byte for byte those that the drafter was trained with"
        for name, what in _SHOULD_AGREE.items()
        if name in drafter and name in given and drafter[name] != given[name]
    ]


def _from_run(path: Path) -> dict[str, Scalar] | None:
    try:
        stores: Any = yaml.safe_load(path.read_text(encoding="utf-8"))["cache"]
        # A relative store was relative to where training ran, which nothing records.
        header = read_header(blobs_at(stores[0]), required=False)
    except (BadInput, KeyError, TypeError, IndexError, OSError, yaml.YAMLError):
        return None
    return None if header is None else dict(header.identity.target)

"""One pack of an int store while its samples arrive: codes in place of states.

Letters: K captured layers, T tokens of a sample, H hidden.
"""

import numpy as np
import torch

from dflash_offline.common.quantize import EncodedStates, encode_states
from dflash_offline.common.store_writer import Store


class CodedPack:
    """Codes of one pack's samples, in any order of arrival."""

    def __init__(self, store: Store) -> None:
        assert store.calibration is not None, "a calibration comes before the first pack"
        self._schema = store.schema
        self._calibration = store.calibration
        self._parts: dict[int, EncodedStates] = {}

    def put(self, start: int, encoded: EncodedStates, rows: slice) -> None:
        """Take a sample's rows of a batch; `start` is its first token inside the pack."""
        # Joined, which copies: the rest of the batch must not live on behind a view.
        self._parts[start] = EncodedStates.joined([encoded.rows(rows.start, rows.stop)])

    def put_zeros(self, start: int, num_tokens: int) -> None:
        """Keep the place of a quarantined sample."""
        schema = self._schema
        zeros = torch.zeros(schema.num_slots, num_tokens, schema.hidden, dtype=torch.bfloat16)
        num_layers = len(schema.layers)
        self._parts[start] = encode_states(
            zeros[:num_layers],
            zeros[num_layers] if schema.num_slots > num_layers else None,
            torch.from_numpy(np.arange(num_tokens) == 0),
            self._calibration,
        )

    def joined(self) -> EncodedStates:
        """Return the whole pack."""
        return EncodedStates.joined([self._parts[start] for start in sorted(self._parts)])

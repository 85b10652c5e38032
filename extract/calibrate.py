"""The states of a few samples, before the first pack, for the codecs that need a calibration.

Which samples, and the fit, are common/calibration.py.
"""

import torch

from dflash_offline.common.calibration import CalibrationRows, calibration_batches
from dflash_offline.common.codec_report import codec_report
from dflash_offline.common.pack_arrays import as_bfloat16
from dflash_offline.common.store_writer import Store
from dflash_offline.common.target import Target
from dflash_offline.extract.forward import StateForward


def calibrate(
    store: Store, forward: StateForward, target: Target, *, seed: int, batch_tokens: int
) -> None:
    """Write the calibration and the codec's error into a store that needs one and has none.

    Samples whose states are not finite are left out; the hot loop quarantines them.
    """
    if not store.needs_calibration:
        return
    plan = store.plan
    pack, start, length = (plan.column(name) for name in ("pack", "start", "length"))
    rows = CalibrationRows()
    for batch in calibration_batches(plan, seed, batch_tokens=batch_tokens):
        states = forward([store.read_tokens(pack[i])[start[i] :][: length[i]] for i in batch])
        first = 0
        for index in batch:
            own = slice(first, first + int(length[index]))
            first = own.stop
            if states.is_finite[:, own].all():
                has_final = store.schema.teacher == "final" and states.final is not None
                final = as_bfloat16(states.final[own]) if has_final else None
                rows.add(as_bfloat16(states.features[:, own]), final)
    calibration = rows.fit(store.schema.codec)
    # In host memory: the head is not on the device during extraction.
    head = target.head_weight().detach().to("cpu") if store.schema.teacher == "final" else None
    with torch.inference_mode():
        error = codec_report(
            rows,
            calibration,
            layers=store.schema.layers,
            head=head,
            logit_scale=target.logit_scale,
            logit_softcap=target.logit_softcap,
        )
    store.write_calibration(calibration, error)

"""`dflash-extract` on one machine: in this process, or as one worker process for each GPU."""

import os

from dflash_offline.common.errors import BadInput
from dflash_offline.common.launch import Job, count_workers, launch, refuse_gpus
from dflash_offline.extract.config import ExtractConfig
from dflash_offline.extract.place import Place, die_with_torchrun, place_in

_SAFE = "what is committed is safe, run the same command to go on"
# After a signal; workers commit for 14 s.
_STOP_S = 19.0


def extract(config: ExtractConfig) -> None:
    """Run `dflash-extract`: here, or with one process for each GPU that `--gpus` asks for.

    Raises:
        BadInput: `--gpus` in a job that another launcher has started, an impossible `--tp`, or both
            `--dry-run` and `--plan-only`.
    """
    if config.dry_run and config.plan_only:
        raise BadInput(
            "--dry-run and --plan-only cannot be had together, since one writes nothing and the "
            "other a plan; leave one out"
        )
    place = place_in(os.environ)
    if place is not None:
        refuse_gpus(config.gpus)
    num_workers = count_workers(config.gpus, on_cpu=False) if place is None else place.size
    # One process plans and estimates, whatever will share the target then.
    is_alone = config.dry_run or config.plan_only
    if not is_alone:
        check_group_size(config.tp, num_workers)
    if place is None and num_workers > 1 and not is_alone:
        job = Job(
            command="dflash-extract",
            run="dflash_offline.extract.run:work",
            config=config,
            safe=_SAFE,
            stop_s=_STOP_S,
            first_tells=True,
            shares_cores=False,
        )
        if code := launch(job, num_workers):
            raise SystemExit(code)
        return
    from dflash_offline.extract.run import extract as extract_here

    die_with_torchrun(os.environ)
    extract_here(config, place or Place())


def check_group_size(tp: int, num_workers: int) -> None:
    """Refuse a `--tp` that leaves workers over.

    Raises:
        BadInput: the number of workers is not a multiple.
    """
    if num_workers % tp:
        raise BadInput(
            f"--tp {tp} cannot be had with {num_workers} worker process(es); give --gpus, or "
            f"start, a multiple of {tp}"
        )

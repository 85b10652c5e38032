"""`dflash-train` on one machine: in this process, or as one worker process for each GPU."""

from dflash_offline.common.launch import Job, count_workers, is_worker, launch, refuse_gpus
from dflash_offline.train.config import TrainConfig

_SAFE = "the same command goes on from the newest checkpoint"
# For a checkpoint of a large drafter on a slow disk, after a signal.
_STOP_S = 120.0


def start(config: TrainConfig) -> None:
    """Train here, or start a process for each GPU that `--gpus` asks for.

    Raises:
        BadInput: `--gpus` in a job that another launcher has started.
    """
    if is_worker():
        refuse_gpus(config.gpus)
    num_workers = 1 if is_worker() else count_workers(config.gpus, on_cpu=config.device == "cpu")
    if num_workers == 1:
        from dflash_offline.train.loop import train

        train(config)
        return
    job = Job(
        command="dflash-train",
        run="dflash_offline.train.loop:train",
        config=config,
        safe=_SAFE,
        stop_s=_STOP_S,
    )
    if code := launch(job, num_workers):
        raise SystemExit(code)

"""The figures of a run: what its log and its progress line say is what the store holds."""

import json

from dflash_offline.common.cache import open_cache
from dflash_offline.common.store import read_plan
from dflash_offline.extract.cli import main as extract_command
from dflash_offline.extract.tally import Tally, progress_values


def test_log_counts_what_the_store_holds(make_target, write_corpus, run, tmp_path):
    out = tmp_path / "s"
    args = ("--target", make_target("qwen3"), "--data", write_corpus(33), "--out", out)
    sizes = ("--pack-tokens", 256, "--batch-tokens", 512, "--layers", "0,1,4", "--codec", "raw")
    assert run(extract_command, *args, *sizes, "--teacher", "final") == 0
    (end,) = (
        record
        for record in map(json.loads, (out / "logs/extract.jsonl").read_text().splitlines())
        if record["kind"] == "end"
    )
    cache = open_cache(str(out))
    lengths = cache.plan.column("length")
    arrays = [cache.record(pack)["arrays"] for pack in cache.packs]
    written = sum(each[name]["bytes"] for each in arrays for name in cache.schema.state_arrays)
    assert end["committed_packs"] == cache.plan.num_packs
    assert end["tokens"] == end["committed_tokens"] == lengths.sum()
    assert end["written_bytes"] == written
    plan, _ = read_plan(cache.blobs, batches=True)
    batches = [lengths[batch] for unit in plan.batches for batch in unit]
    assert end["padded_tokens"] == sum(len(batch) * batch.max() for batch in batches)
    assert end["padded_frac"] == 1 - end["tokens"] / end["padded_tokens"]
    assert (end["splits"], end["quarantined"]) == (0, {})


def test_total_of_workers_and_the_progress_line():
    parts = {
        1: Tally(tokens=300, padded_tokens=400, committed_packs=2, seconds=2.0, splits=1),
        0: Tally(tokens=500, padded_tokens=600, committed_tokens=70, seconds=4.0, copying=1),
    }
    parts[1].quarantined, parts[0].quarantined = {7: "why"}, {3: "why"}
    parts[0].written_bytes, parts[1].queued_packs = 8_000_000_000, 2
    passed_on = [Tally.from_record(json.loads(json.dumps(p.as_record()))) for p in parts.values()]
    assert passed_on == list(parts.values())
    total = Tally.total(passed_on)
    assert (total.tokens, total.padded_tokens, total.seconds) == (800, 1000, 4.0)
    assert total.quarantined == {7: "why", 3: "why"}
    assert total.tokens_per_s == 200
    assert progress_values(parts, num_packs=9, done_packs=3, done_tokens=1000) == {
        "packs": "5/9",
        "tokens": "1,070",
        "tok/s": "275 (125 150)",
        "padded": "20%",
        "written": "8,000.0 MB, 2.00 GB/s",
        "queued": "1+2",
        "splits": "1",
        "bad": "2",
    }

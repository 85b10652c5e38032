"""The cache of decoding holds what transformers' own would, in few tensors."""

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from dflash_offline.common.target import load_target
from dflash_offline.extract import batch_decode
from dflash_offline.extract.batch_decode import Sampling, decode_batch
from dflash_offline.extract.roomy_cache import RoomyLayer, roomy_cache


def test_memory_grows_in_few_steps_up_to_the_limit():
    rows, heads, width, limit = 6, 2, 4, 220
    plain, roomy = DynamicLayer(), RoomyLayer(limit=limit)
    generator = torch.Generator().manual_seed(0)
    stores: set[int] = set()
    kept_alive: list[torch.Tensor] = []  # no address is given out twice
    for step in range(201):
        tokens = 20 if step == 0 else 1
        new = torch.randn(2, rows, heads, tokens, width, generator=generator)
        plain.update(*new)
        keys, values = roomy.update(*new)
        assert torch.equal(keys, plain.keys)
        assert torch.equal(values, plain.values)
        assert roomy.get_seq_length() == 20 + step
        assert roomy.get_mask_sizes(1) == plain.get_mask_sizes(1)
        kept_alive += [keys, values]
        for held in (keys, values):
            stores.add(held.untyped_storage().data_ptr())
            assert held.untyped_storage().nbytes() <= rows * heads * limit * width * 4
        if step in (90, 150):
            going = torch.tensor([0, 2, 3, 5][: 4 if step == 90 else 2])
            rows = len(going)
            for layer in (plain, roomy):
                layer.reorder_cache(going)
    # Room for 89 and 176 tokens, for 202 of four rows, 220 of two; each of keys and of values.
    assert len(stores) == 8
    # A token above the limit costs what it costs with transformers' layer.
    over = torch.ones(rows, heads, 1, width)
    assert roomy.update(over, over)[0].shape[2] == limit + 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5-hybrid"])
def test_decoding_is_that_of_a_plain_cache(family: str, make_target, monkeypatch):
    target = load_target(make_target(family), dtype=torch.float32, device="cpu", head=True)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 250, (n,), generator=generator).tolist() for n in (3, 30, 1, 9)]
    sampling = Sampling(max_new_tokens=90, temperature=1.0)
    caches: list[DynamicCache] = []

    def decode(make_cache, stop_ids):
        def remembered(config, *, limit):
            caches.append(make_cache(config, limit=limit))
            return caches[-1]

        monkeypatch.setattr(batch_decode, "roomy_cache", remembered)
        return decode_batch(target, prompts, range(4), stop_ids=stop_ids, sampling=sampling)

    def plain_cache(config, *, limit):
        return DynamicCache(config=config)

    stop_ids = [decode(plain_cache, [])[0].tokens[40]]
    expected, found = decode(plain_cache, stop_ids), decode(roomy_cache, stop_ids)
    assert found == expected
    assert not all(each.is_cut for each in found)
    plain, roomy = caches[1:]
    kinds = {type(layer) for layer in roomy.layers}
    assert RoomyLayer in kinds
    assert (DynamicSlidingWindowLayer in kinds) == (family == "gemma3")
    for one, other in zip(plain.layers, roomy.layers, strict=True):
        if type(one) is DynamicLayer:
            assert type(other) is RoomyLayer
            torch.testing.assert_close(other.keys, one.keys)
            torch.testing.assert_close(other.values, one.values)
        else:
            assert type(other) is type(one)
    # Rows that ended are gone from both.
    held = next(layer for layer in roomy.layers if type(layer) is RoomyLayer).keys
    assert held.shape[0] < len(prompts)


def test_no_attention_that_plans_for_every_number_of_keys(make_target):
    target = load_target(make_target("llama"), dtype=torch.float32, device="cpu", head=True)
    enabled = []
    target.causal.register_forward_pre_hook(
        lambda *_: enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    decode_batch(target, [[7, 8]], [0], stop_ids=[], sampling=Sampling(max_new_tokens=3))
    assert enabled == [False, False, False]

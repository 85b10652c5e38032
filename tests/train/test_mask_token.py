"""The mask token: each rule in turn, and what is refused."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dflash_offline.common.cache import Cache, open_cache
from dflash_offline.common.errors import BadInput
from dflash_offline.train.mask_token import choose_mask_token, tokenizer_facts

WORDS = [f"w{number}" for number in range(90)]
SPECIAL = ["<pad>", "<eos>", "<unk>", "<bos>", "<empty_output>", "<|reserved_1|>"]  # 90 to 95


def tokenizer_files(
    specials: list[str], roles: dict[str, str], first_special: int
) -> dict[str, bytes]:
    ids = {word: id for id, word in enumerate(WORDS)}
    ids |= {word: id for id, word in enumerate(specials, start=first_special)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token="w0"))
    tokenizer.add_special_tokens(specials)
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(roles).encode(),
    }


@pytest.fixture
def cache_with(corpus_maker, tmp_path):
    """Make a store of 97 embedding rows whose tokenizer has 90 words and the given specials."""

    def make(specials=SPECIAL, used=(), first_special=90, **roles) -> Cache:
        roles = {
            "pad_token": "<pad>",
            "eos_token": {"content": "<eos>"},
            "unk_token": "<unk>",
        } | roles
        corpus = corpus_maker()
        corpus.target_files |= tokenizer_files(specials, roles, first_special)
        for tokens in corpus.tokens:
            tokens[:] = tokens % 90
        if used:
            corpus.tokens[0][: len(used)] = used
        folder = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        corpus.write(folder)
        return open_cache(str(folder))

    return make


EMBED = torch.ones(97, 4)


def with_zero_rows(*rows: int) -> torch.Tensor:
    embed = EMBED.clone()
    embed[list(rows)] = 0
    return embed


def test_what_the_user_says_comes_first(cache_with):
    cache = cache_with(mask_token="<bos>")
    assert choose_mask_token([cache], EMBED, given=7, initial=8).id == 7
    assert "--mask-token-id" in choose_mask_token([cache], EMBED, given=7).reason
    assert choose_mask_token([cache], EMBED, initial=8).id == 8


def test_then_the_tokenizers_own(cache_with):
    choice = choose_mask_token([cache_with(mask_token="<bos>")], EMBED)
    assert choice.id == 93
    assert choice.reason == "the tokenizer's mask token"


def test_then_a_row_beyond_the_tokenizer(cache_with):
    cache = cache_with()
    assert tokenizer_facts(cache).size == 96
    assert choose_mask_token([cache], EMBED).id == 96
    smaller = cache_with(specials=SPECIAL[:4])
    assert choose_mask_token([smaller], with_zero_rows(94)).id == 95
    # 94 tokens, and one of them is 94.
    with_gap = cache_with(specials=SPECIAL[:4], first_special=91)
    assert choose_mask_token([with_gap], EMBED).id == 95


def test_then_a_special_token_that_the_corpus_leaves_free(cache_with):
    cache = cache_with()
    choice = choose_mask_token([cache], with_zero_rows(96))
    assert choice.id == 95
    assert "<|reserved_1|>" in choice.reason
    assert "no spare embedding row" in choice.reason


def test_a_special_token_in_the_corpus_is_not_taken(cache_with):
    cache = cache_with(used=(95,))
    assert choose_mask_token([cache], with_zero_rows(96)).id == 94


def test_names_that_sound_free_are_preferred(cache_with):
    specials = [*SPECIAL[:4], "<|reserved_1|>", "<empty_output>"]
    assert choose_mask_token([cache_with(specials=specials)], with_zero_rows(96)).id == 94


def test_nothing_left(cache_with):
    cache = cache_with(used=(93, 94, 95))
    with pytest.raises(BadInput, match="give an id that never occurs"):
        choose_mask_token([cache], with_zero_rows(96))


@pytest.mark.parametrize(
    ("token", "words"),
    [(90, "pad token"), (91, "eos token"), (92, "unk token"), (97, "no row"), (5, "all-zero")],
)
@pytest.mark.parametrize("source", ["given", "initial"])
def test_what_is_refused(cache_with, token, words, source):
    with pytest.raises(BadInput, match=words):
        choose_mask_token([cache_with()], with_zero_rows(5), **{source: token})


def test_a_mask_token_that_is_padding_too_is_passed_over(cache_with):
    assert choose_mask_token([cache_with(mask_token="<pad>")], EMBED).id == 96


def test_a_store_without_a_tokenizer_needs_the_option(small_store):
    cache = open_cache(small_store[0])
    assert tokenizer_facts(cache).size is None
    with pytest.raises(BadInput, match="--mask-token-id is not given"):
        choose_mask_token([cache], EMBED)

"""Evaluate a drafter by decoding prompts with its target, and count what that saves.

At temperature 0 every prompt is also decoded by the target alone, and the two answers are compared
(`train/agreement.py`).
"""

import statistics
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from dflash_offline.common.chat import (
    ChatOptions,
    chat_identity,
    render_prompt,
    stop_token_ids,
    tokenizer_identity,
)
from dflash_offline.common.device_choice import dtype_name
from dflash_offline.common.errors import BadInput
from dflash_offline.common.progress import ProgressLine
from dflash_offline.common.prompts import Prompt, read_prompts
from dflash_offline.common.target import Target, load_target, load_tokenizer
from dflash_offline.train.agreement import Agreement, Comparison, LogitTrace
from dflash_offline.train.announce import say
from dflash_offline.train.decode import Decoded, SpeculativeDecoder, decode_greedy
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.eval_config import EvalConfig
from dflash_offline.train.export import load_drafter
from dflash_offline.train.provenance import check_same_target, drafter_identity, notes_on_target


@dataclass(kw_only=True)
class ServingEvaluation:
    """All answers and what they cost."""

    about: dict[str, Any]
    num_slots: int  # tokens that a block proposes
    agreement: Agreement | None  # None when sampling
    answers: list[Decoded] = field(default_factory=list)
    alone: list[Decoded] = field(default_factory=list)  # the target's own, at temperature 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def num_cycles(self) -> int:
        """Drafts, each judged in one forward of the target."""
        return sum(len(answer.cycles) for answer in self.answers)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens gained per target step; the prefill and its token are not counted."""
        produced = sum(cycle.produced for answer in self.answers for cycle in answer.cycles)
        return produced / self.num_cycles if self.num_cycles else float("nan")

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of drafts in which this token and all before it were kept, of those judged."""
        cycles = [cycle for answer in self.answers for cycle in answer.cycles]
        shares = []
        for position in range(1, self.num_slots + 1):
            judged = [cycle for cycle in cycles if cycle.proposed >= position]
            kept = sum(cycle.accepted >= position for cycle in judged)
            shares.append(kept / len(judged) if judged else float("nan"))
        return shares

    @property
    def steps_saved_frac(self) -> float:
        """Share of the forwards after the prefill that drafting saved."""
        needed = self.num_tokens - len(self.answers)
        return 1 - self._steps() / needed if needed else float("nan")

    def problem(self) -> str | None:
        """Return one sentence on answers that differ from the target's own, or None."""
        return None if self.agreement is None else self.agreement.problem()

    def rows(self) -> list[tuple[str, str]]:
        """Return (measure, value) for the table."""
        steps = f"{self._steps():,} instead of {self.num_tokens - len(self.answers):,}"
        rows = [
            ("prompts", f"{len(self.answers):,}"),
            ("acceptance length", f"{self.acceptance_length:.3f}"),
            ("target steps", steps),
            ("target steps saved", f"{100 * self.steps_saved_frac:.1f} %"),
        ]
        if reruns := sum(answer.reruns for answer in self.answers):
            rows.append(("of them to rebuild a recurrent state", f"{reruns:,}"))
        if self.agreement is not None:
            rows += self._agreement_rows(self.agreement)
        rows.append(("tokens/s, drafting", f"{_tokens_per_s(self.answers):.1f}"))
        if self.alone:
            rows.append(("tokens/s, target alone", f"{_tokens_per_s(self.alone):.1f}"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        result = self.about | {
            "mode": "target",
            "num_prompts": len(self.answers),
            "num_tokens": self.num_tokens,
            "acceptance_length": self.acceptance_length,
            "accepted_by_position": self.accepted_by_position,
            "target_steps": self._steps(),
            "target_steps_saved_frac": self.steps_saved_frac,
            "reruns": sum(answer.reruns for answer in self.answers),
            "tokens_per_s": _tokens_per_s(self.answers),
            "tokens_per_s_alone": _tokens_per_s(self.alone),
            "answers": [_answer_dict(answer) for answer in self.answers],
        }
        if (agreement := self.agreement) is not None:
            result["agreement"] = {
                "tokens_equal": agreement.num_tokens_equal,
                "prompts_different": agreement.num_different,
                "prompts_excused": len(agreement.excused()),
                "rounding": agreement.rounding,
                "control_rounding": agreement.control,
                "problem": agreement.problem(),
            }
        return result

    def _steps(self) -> int:
        return sum(answer.target_steps + answer.reruns for answer in self.answers)

    def _agreement_rows(self, agreement: Agreement) -> list[tuple[str, str]]:
        alone = sum(len(answer.tokens) for answer in self.alone)
        rows = [
            ("tokens equal to the target's own", f"{agreement.num_tokens_equal:,} of {alone:,}")
        ]
        if not agreement.exact:
            excused = agreement.excused()
            margins = ", ".join(f"{each.margin:.2g}" for each in excused)
            rows += [
                ("answers that part from it", f"{agreement.num_different:,}"),
                (
                    "of them within rounding",
                    f"{len(excused):,}" + (f" ({margins})" * bool(excused)),
                ),
                ("rounding between the forwards", f"{agreement.rounding:.3g}"),
            ]
        return rows


def evaluate_serving(
    config: EvalConfig, *, device: torch.device, dtype: torch.dtype
) -> ServingEvaluation:
    """Decode every turn of the prompts.

    Raises:
        BadInput: prompts, drafter, target or chat options that do not fit each other.
    """
    assert config.draft is not None
    assert config.data is not None
    assert config.target is not None
    prompts = read_prompts(config.data, config.num_prompts)
    drafter = load_drafter(config.draft, dtype, device)
    tokenizer = load_tokenizer(
        config.target, config.target_revision, trust_remote_code=config.trust_remote_code
    )
    chat = ChatOptions.from_options(
        config.chat_template, config.chat_template_arg, config.system_prompt
    )
    identity = drafter_identity(config.draft)
    check_same_target(identity, chat_identity(tokenizer, chat), where="this call")
    target = load_target(
        config.target,
        dtype=dtype,
        device=device,
        revision=config.target_revision,
        head=True,
        trust_remote_code=config.trust_remote_code,
    )
    _check_fit(drafter, target, config)
    here = {
        "weight_digest": target.weight_digest(),
        "tokenizer_sha256": tokenizer_identity(tokenizer),
    }
    for line in notes_on_target(identity, here):
        say(f"note: {line}")
    evaluator = _Evaluator(config, target, drafter, tokenizer, chat)
    return evaluator.run(prompts)


class _Evaluator:
    def __init__(
        self,
        config: EvalConfig,
        target: Target,
        drafter: Drafter,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatOptions,
    ) -> None:
        self._config = config
        self._target = target
        self._drafter = drafter
        self._tokenizer = tokenizer
        self._chat = chat
        self._stop = stop_token_ids(tokenizer, target.generation_config)
        self._is_greedy = config.temperature == 0
        self._is_exact = target.dtype in (torch.float32, torch.float64)
        layout = drafter.config
        self._result = ServingEvaluation(
            about={
                "draft": str(config.draft),
                "target": config.target,
                "data": str(config.data),
                "dtype": dtype_name(target.dtype),
                "device": str(target.device),
                "temperature": config.temperature,
                "seed": config.seed,
                "max_new_tokens": config.max_new_tokens,
            },
            num_slots=layout.block_size - (not layout.sample_from_anchor),
            agreement=Agreement(exact=self._is_exact) if self._is_greedy else None,
        )

    def run(self, prompts: list[Prompt]) -> ServingEvaluation:
        total = sum(len(prompt.turns) for prompt in prompts)
        fields = ("prompt", "acceptance", "tok/s")
        for prompt in prompts:
            self._render(prompt, [])  # Too long is better said before the first answer.
        with (
            SpeculativeDecoder(
                self._target,
                self._drafter,
                temperature=self._config.temperature,
                seed=self._config.seed,
            ) as decoder,
            ProgressLine(total, fields) as line,
        ):
            for prompt in prompts:
                texts: list[str] = []
                for _ in prompt.turns:
                    ids = self._render(prompt, texts)
                    answer = self._answer(decoder, ids)
                    texts.append(self._text(answer.tokens))
                    self._show(line, total)
        return self._result

    def _text(self, tokens: list[int]) -> str:
        """Return an answer as the next turn's prompt has it."""
        ended = tokens[-1] in self._stop
        # Marks of reasoning and calls are special tokens of some targets, and their words.
        return self._tokenizer.decode(tokens[: len(tokens) - ended], skip_special_tokens=False)

    def _render(self, prompt: Prompt, answers: list[str]) -> list[int]:
        ids = render_prompt(self._tokenizer, prompt.messages(answers), self._chat)
        # Purely recurrent targets state no limit.
        room = self._target.config.to_dict().get("max_position_embeddings") or sys.maxsize
        if len(ids) + self._config.max_new_tokens > room:
            raise BadInput(
                f"prompt {prompt.id} has {len(ids)} tokens, and --max-new-tokens "
                f"{self._config.max_new_tokens} more pass the target's {room}; lower it, or leave "
                "the prompt out"
            )
        return ids

    def _answer(self, decoder: SpeculativeDecoder, ids: list[int]) -> Decoded:
        limit = self._config.max_new_tokens
        result = self._result
        if not self._is_greedy:
            answer = decoder.decode(
                ids, max_new_tokens=limit, stop_ids=self._stop, stream=len(result.answers)
            )
            result.answers.append(answer)
            return answer
        trace = LogitTrace()
        alone = decode_greedy(
            self._target, ids, max_new_tokens=limit, stop_ids=self._stop, watch=trace.watch
        )
        comparison = Comparison(trace)
        answer = decoder.decode(
            ids, max_new_tokens=limit, stop_ids=self._stop, watch=comparison.watch
        )
        result.answers.append(answer)
        result.alone.append(alone)
        assert result.agreement is not None
        result.agreement.prompts.append(comparison.finish(alone.tokens, answer.tokens))
        if not self._is_exact:
            control = self._control(trace, ids, alone.tokens)
            result.agreement.control = max(result.agreement.control, control)
        return answer

    @torch.inference_mode()
    def _control(self, trace: LogitTrace, prompt: list[int], answer: list[int]) -> float:
        """Return the rounding between the greedy forwards and one over the whole text."""
        text = torch.tensor([[*prompt, *answer[:-1]]], device=self._target.device)
        output = self._target.causal(input_ids=text, use_cache=False, logits_to_keep=len(answer))
        return trace.control(output.logits[0])

    def _show(self, line: ProgressLine, total: int) -> None:
        result = self._result
        line.update(
            len(result.answers),
            {
                "prompt": f"{len(result.answers)}/{total}",
                "acceptance": f"{result.acceptance_length:.2f}",
                "tok/s": f"{_tokens_per_s(result.answers):.0f}",
            },
        )


def _check_fit(drafter: Drafter, target: Target, config: EvalConfig) -> None:
    shape = drafter.config
    for what, drafted, served in (
        ("width", shape.hidden_size, target.hidden_size),
        ("layers of its target", shape.num_target_layers, target.num_layers),
    ):
        if drafted != served:
            raise BadInput(
                f"--draft {config.draft} was made for {what} {drafted}, but --target "
                f"{config.target} has {served}; give the target it was trained for"
            )
    outside = [i for i in shape.target_layer_ids if not 0 <= i < target.num_layers - 1]
    if outside or shape.mask_token_id >= target.vocab_size:
        raise BadInput(
            f"--draft {config.draft} asks for layer ids {list(shape.target_layer_ids)} and mask "
            f"token {shape.mask_token_id}, which --target {config.target} with "
            f"{target.num_layers} layers and {target.vocab_size} tokens does not have"
        )


def _tokens_per_s(answers: list[Decoded]) -> float:
    """Return the tokens after the first of each answer per second, prefill apart."""
    seconds = sum(answer.seconds for answer in answers)
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    return tokens / seconds if seconds else float("nan")


def _answer_dict(answer: Decoded) -> dict[str, Any]:
    produced = [cycle.produced for cycle in answer.cycles]
    return {
        "num_prompt": answer.num_prompt,
        "num_tokens": len(answer.tokens),
        "produced": produced,
        "acceptance_length": statistics.fmean(produced) if produced else float("nan"),
        "seconds": answer.seconds,
        "prefill_s": answer.prefill_s,
    }

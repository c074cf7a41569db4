"""The contract of an engine, held by both: each test runs on transformers' generate and on vLLM.

vLLM changes the process it runs in (torch's threads, the default process group), so its engines live in another one.
"""

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rayless.rollout.engine import (
    Completion,
    RolloutConfig,
    end_token_ids,
    kept_tokens,
    text_before_stop,
)
from rayless.rollout.hf_engine import HFEngine

TINY = Path(__file__).parents[1] / "models/tiny"
STOP_CASES = [json.loads(line) for line in (Path(__file__).parent / "cases/stop_cases.jsonl").open()]
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
END, OTHER_END = 2, 7  # of the tokenizer and the model; of the generation settings alone
A, B = TOKENIZER.encode("a") + TOKENIZER.encode("b")
CONFIG = RolloutConfig(num_generations=4, max_prompt_length=320, max_new_tokens=8)
PROMPTS = [list(range(1000 + number, 1005 + 4 * number)) for number in range(4)]
SEEDS = [5, 1029, 2053, 3077]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Weights = dict[str, Tensor]


# What runs beside the engine: in this process for transformers, in the other one for vLLM.

_running: Any = None


def _start(kind: str, folder: Path, dtype: torch.dtype) -> None:
    global _running
    device = torch.device("cpu")
    if kind == "hf":
        _running = HFEngine(str(folder), TOKENIZER, CONFIG, dtype=dtype, device=device)
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    from rayless.rollout.vllm_engine import VLLMEngine

    _running = VLLMEngine(str(folder), TOKENIZER, CONFIG, dtype=dtype, device=device, seed=1)


def _generate(groups: list[tuple[int, list[int], int]], settings: dict[str, Any]) -> list[tuple[int, list[Completion]]]:
    """Run groups of (number, prompt, seed) and give them in the order in which they finished."""
    _running.config = replace(CONFIG, **settings)
    assert not _running.busy
    for number, prompt, seed in groups:
        _running.add(number, prompt, seed=seed)
        assert _running.busy
    finished = []
    while _running.busy:
        finished += _running.step()
    return finished


def _load(weights: Weights, version: int) -> None:
    _running.load_weights(iter(weights.items()), version=version)


def _load_while_busy(weights: Weights) -> None:
    _running.add(0, PROMPTS[0], seed=1)
    _load(weights, 1)


def _stop() -> None:
    _running.close()


class Bench:
    """One engine at a time, as it came from its folder or with weights that a test loaded."""

    def __init__(self, kind: str, call: Callable[..., Any]) -> None:
        self.kind, self.call = kind, call
        self.running: tuple[Path, torch.dtype] | None = None
        self.untouched = False

    def open(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Have an engine that nobody has loaded weights into."""
        if (folder, dtype) == self.running and self.untouched:
            return
        self.close()
        self.call(_start, self.kind, folder, dtype)
        self.running, self.untouched = (folder, dtype), True

    def load(self, weights: Weights, version: int = 1) -> None:
        self.untouched = False
        self.call(_load, weights, version)

    def load_while_busy(self, weights: Weights) -> None:
        self.untouched = False
        self.call(_load_while_busy, weights)

    def generate(
        self, prompts: Sequence[list[int]] = PROMPTS, seeds: Sequence[int] = SEEDS, **settings: Any
    ) -> list[list[Completion]]:
        """The completions of each prompt; every group has to come back exactly once."""
        groups = [(number, prompt, seeds[number]) for number, prompt in enumerate(prompts)]
        finished = self.call(_generate, groups, settings)
        assert sorted(number for number, _ in finished) == list(range(len(prompts)))
        return [completions for _, completions in sorted(finished)]

    def close(self) -> None:
        if self.running is not None:
            self.call(_stop)
        self.running = None


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.job)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "hf":
        yield Bench("hf", lambda function, *arguments: function(*arguments))
        return
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        bench = Bench("vllm", lambda function, *arguments: pool.submit(function, *arguments).result())
        yield bench
        bench.close()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own, two end tokens, and settings that would bend the distribution."""
    folder = tmp_path_factory.mktemp("models") / "untied"
    config = Qwen3Config.from_pretrained(TINY)
    config.tie_word_embeddings = False
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    settings = {"eos_token_id": [END, OTHER_END], "temperature": 0.3, "top_k": 5, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True}))
    return folder


def weights_of(folder: Path) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def scaled(weights: Weights) -> Weights:
    return {name: 1.05 * tensor for name, tensor in weights.items()}


def leaning(weights: Weights, boosts: dict[int, float]) -> Weights:
    """Weights that make the given tokens likely after any text: only they have a large first number in the head."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    weights[EMBEDDING][:, 0] = 1.0
    head = weights.get(HEAD, weights[EMBEDDING])
    head[:, 0] = 1.0
    for token, boost in boosts.items():
        head[token, 0] = 1.0 + boost
    return weights


@torch.no_grad()
def errors(
    folder: Path, groups: list[list[Completion]], temperature: float = 1.0, weights: Weights | None = None
) -> Tensor:
    """How far each log-prob of the groups (of PROMPTS) is from what the model gives when it reads the whole answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights or {}, strict=False)
    found = []
    for prompt, completions in zip(PROMPTS, groups, strict=True):
        for completion in completions:
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits / temperature, dim=-1)[range(len(logits)), completion.token_ids]
            found.append((torch.tensor(completion.log_probs) - expected).abs())
    return torch.cat(found)


def tokens(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in completions] for completions in groups]


def test_a_group_comes_back_with_all_its_completions_whole(bench: Bench) -> None:
    bench.open(TINY)
    groups = bench.generate()
    assert [len(completions) for completions in groups] == [4, 4, 4, 4]
    for completion in (completion for completions in groups for completion in completions):
        assert len(completion.log_probs) == len(completion.versions) == len(completion.token_ids)
        assert set(completion.versions) == {0}
        assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
        assert completion.truncated == (END not in completion.token_ids)
        assert len(completion.token_ids) == 8 or not completion.truncated


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_log_probs_are_those_of_the_distribution_sampled_from(bench: Bench, temperature: float) -> None:
    bench.open(TINY)
    groups = bench.generate(temperature=temperature)
    assert errors(TINY, groups, temperature).max() < 1e-4


def test_bfloat16_log_probs_stay_close(bench: Bench) -> None:
    bench.open(TINY, torch.bfloat16)
    groups = bench.generate(temperature=0.5)
    assert errors(TINY, groups, temperature=0.5).mean() < 5e-2


def test_a_seed_repeats_and_other_seeds_differ(bench: Bench) -> None:
    bench.open(TINY)
    first, again = bench.generate(), bench.generate()
    assert tokens(first) == tokens(again)
    one_prompt = bench.generate([PROMPTS[0]] * 2, seeds=[SEEDS[0], SEEDS[1]])
    answers = {tuple(ids) for group in tokens(one_prompt) for ids in group}
    assert len(answers) == 8  # neither inside a group nor between two of the same prompt is anything said twice
    assert tokens(one_prompt)[0] == tokens(first)[0]


def test_a_group_does_not_depend_on_the_others(bench: Bench) -> None:
    bench.open(TINY)
    forwards = bench.generate()
    backwards = bench.generate(PROMPTS[::-1], seeds=SEEDS[::-1])[::-1]
    (alone,) = bench.generate(PROMPTS[:1], seeds=SEEDS[:1])
    assert tokens(forwards) == tokens(backwards)
    assert tokens(forwards)[0] == tokens([alone])[0]
    for one, other in zip(forwards[0], alone, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_an_end_token_is_part_of_the_answer_and_only_the_limit_cuts_off(bench: Bench) -> None:
    bench.open(TINY)
    weights = leaning(weights_of(TINY), {A: 2.5, B: 2.5, END: 2.4})
    bench.load(weights)
    groups = bench.generate(num_generations=16)
    completions = [completion for group in groups for completion in group]
    for completion in completions:
        ended = completion.token_ids[-1] == END
        assert completion.truncated == (not ended)
        assert len(completion.token_ids) == 8 or ended
        assert END not in completion.token_ids[:-1]
        assert set(completion.text) <= {"a", "b"}
    assert {completion.truncated for completion in completions} == {True, False}
    assert min(len(completion.token_ids) for completion in completions) == 1  # an end token and nothing else
    assert errors(TINY, groups, weights=weights).max() < 1e-4


def test_every_end_token_of_the_settings_ends_and_no_other_setting_counts(bench: Bench, untied: Path) -> None:
    bench.open(untied)
    groups = bench.generate()
    assert errors(untied, groups).max() < 1e-4
    weights = leaning(weights_of(untied), {A: 2.5, OTHER_END: 2.5})
    bench.load(weights)
    groups = bench.generate(num_generations=8)
    ended = [completion for group in groups for completion in group if completion.token_ids[-1] == OTHER_END]
    assert len(ended) > 16
    assert not any(completion.truncated for completion in ended)
    assert errors(untied, groups, weights=weights).max() < 1e-4


def test_a_stop_text_ends_an_answer_and_stays_out_of_its_text(bench: Bench) -> None:
    bench.open(TINY)
    weights = leaning(weights_of(TINY), {A: 2.5, B: 2.5})
    bench.load(weights)
    groups = bench.generate(num_generations=8, stop=["zz", "ab"])
    stopped = [completion for group in groups for completion in group if not completion.truncated]
    assert len(stopped) > 16
    for completion in stopped:
        assert TOKENIZER.decode(completion.token_ids) == completion.text + "ab"
        assert "ab" not in completion.text
        assert len(completion.log_probs) == len(completion.token_ids) <= 8
    assert len({len(completion.token_ids) for completion in stopped}) > 1
    assert errors(TINY, groups, weights=weights).max() < 1e-4


def test_new_weights_are_used_whole_and_name_the_tokens_they_sample(bench: Bench) -> None:
    bench.open(TINY)
    weights = scaled(weights_of(TINY))
    bench.load(weights, version=6)
    bench.load(weights, version=7)
    groups = bench.generate()
    assert {version for group in groups for completion in group for version in completion.versions} == {7}
    assert errors(TINY, groups, weights=weights).max() < 1e-4
    assert errors(TINY, groups).max() > 1e-3  # the old weights would have been noticed


def test_nothing_cached_outlives_the_weights(bench: Bench, tmp_path: Path) -> None:
    weights = scaled(weights_of(TINY))
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    prompts = [list(range(500, 564)), list(range(1000, 1300))]  # vLLM caches blocks of 128 tokens

    bench.open(TINY)
    bench.generate(prompts)
    before = bench.generate(prompts)
    bench.load(weights)
    after = bench.generate(prompts)
    bench.open(tmp_path)
    fresh = bench.generate(prompts)

    assert tokens(after) == tokens(fresh)
    for one, other in zip(after[0] + after[1], fresh[0] + fresh[1], strict=True):
        assert one.text == other.text
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert before[1][0].log_probs != pytest.approx(after[1][0].log_probs, abs=1e-3)


def test_weights_wait_for_running_groups(bench: Bench) -> None:
    bench.open(TINY)
    with pytest.raises(AssertionError, match="between groups"):
        bench.load_while_busy(weights_of(TINY))


def test_a_tied_head_may_come_on_top(bench: Bench) -> None:
    bench.open(TINY)
    weights = weights_of(TINY)
    weights[EMBEDDING] += 0.1
    bench.load({**weights, HEAD: weights[EMBEDDING]})
    on_top = bench.generate()
    assert errors(TINY, on_top, weights=weights).max() < 1e-4
    bench.load(weights)
    assert tokens(bench.generate()) == tokens(on_top)


def test_an_untied_model_takes_its_embedding_and_its_head(bench: Bench, untied: Path) -> None:
    bench.open(untied)
    weights = weights_of(untied)
    weights[EMBEDDING] += 0.1
    weights[HEAD] *= 2.0
    bench.load(weights)
    assert errors(untied, bench.generate(), weights=weights).max() < 1e-4


@pytest.mark.parametrize("missing", [HEAD, EMBEDDING, "model.layers.2.self_attn.k_proj.weight", "model.norm.weight"])
def test_a_tensor_that_never_came_is_named(bench: Bench, untied: Path, missing: str) -> None:
    bench.open(untied)
    weights = weights_of(untied)
    del weights[missing]
    with pytest.raises(RuntimeError, match=f"version 3: the engine never received {missing}$"):
        bench.load(weights, version=3)


def test_a_tensor_that_the_model_does_not_have_is_named(bench: Bench) -> None:
    bench.open(TINY)
    weights = {**weights_of(TINY), "model.layers.0.mlp.side_proj.weight": torch.ones(128)}
    with pytest.raises((RuntimeError, ValueError), match=r"layers\.0\.mlp\.side_proj"):
        bench.load(weights)


@pytest.mark.parametrize("case", STOP_CASES, ids=lambda case: case["id"])
def test_an_answer_reaches_to_its_first_end_token(case: dict[str, Any]) -> None:
    assert kept_tokens(case["token_ids"], case["eos_ids"], case["max_new_tokens"]) == (case["kept"], case["truncated"])


def test_all_end_tokens_of_model_and_tokenizer_count(tmp_path: Path, untied: Path) -> None:
    assert end_token_ids(str(untied), TOKENIZER) == [END, OTHER_END]
    assert end_token_ids(str(TINY), TOKENIZER) == [END]
    assert end_token_ids(str(tmp_path), TOKENIZER) == [END]  # no generation settings there
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": OTHER_END}))
    assert end_token_ids(str(tmp_path), TOKENIZER) == [END, OTHER_END]


def test_text_ends_before_the_first_stop_text() -> None:
    assert text_before_stop("one, two; three", [";", ","]) == "one"
    assert text_before_stop("one", [";"]) is None
    assert text_before_stop("; one", [";"]) == ""
    assert text_before_stop("one", []) is None

"""Rollouts: exactly the stated distribution, and clean ends."""

import pytest
import torch

from potstill.rollouts.transformers import TransformersRollouts, cut_after_eos, pad_id, stop_token_ids
from train_fixtures import make_model, make_tokenizer


def row(*ids):
    return {"prompt_ids": list(ids), "answer": None}


def test_left_padding_changes_no_greedy_completion():
    model, tokenizer = make_model(), make_tokenizer()
    greedy = TransformersRollouts(tokenizer, max_new_tokens=8, temperature=0.0)
    rows = [row(1, 4, 5, 6, 7), row(1), row(1, 9, 4)]
    together = greedy(model, rows, seed=0)
    assert together == [greedy(model, [one], seed=0)[0] for one in rows]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.5, 1.0), (1.0, 0.6)])
def test_samples_follow_the_stated_distribution_whatever_the_model_prefers(temperature, top_p):
    model, tokenizer = make_model(initializer_range=0.1), make_tokenizer()
    own = model.generation_config
    own.do_sample, own.top_k, own.repetition_penalty, own.min_p, own.max_new_tokens = True, 1, 9.0, 0.5, 3
    own.suppress_tokens = [5, 6, 7]
    prompt = row(1, 4, 5)
    n = 4096
    rollouts = TransformersRollouts(tokenizer, max_new_tokens=1, temperature=temperature, top_p=top_p)
    first = torch.tensor([ids[0] for ids in rollouts(model, [prompt] * n, seed=0)])
    with torch.no_grad():
        probs = (model(torch.tensor([prompt["prompt_ids"]])).logits[0, -1] / temperature).softmax(-1)
    ranked = probs.sort(descending=True)
    kept = ranked.indices[: int((ranked.values.cumsum(0) < top_p).sum()) + 1] if top_p < 1 else ranked.indices
    expected = torch.zeros_like(probs)
    expected[kept] = probs[kept] / probs[kept].sum()
    counts = torch.bincount(first, minlength=len(probs)).double()
    live = expected > 0
    assert counts[~live].sum() == 0
    # Pearson's statistic has mean and variance df and 2 df; five standard deviations are allowed.
    chi2 = ((counts[live] - n * expected[live]) ** 2 / (n * expected[live])).sum()
    df = int(live.sum()) - 1
    assert chi2 < df + 5 * (2 * df) ** 0.5
    assert model.generation_config is own and own.top_k == 1


def test_samples_depend_on_the_seed_alone_and_disturb_nothing():
    model, tokenizer = make_model().train(), make_tokenizer()
    rollouts = TransformersRollouts(tokenizer, max_new_tokens=6)
    rows = [row(1, 4), row(1, 5, 6)]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = rollouts(model, rows, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert rollouts(model, rows, seed=7) == first
    assert rollouts(model, rows, seed=8) != first
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_prompts_of_similar_lengths_are_completed_together_and_come_back_in_order(monkeypatch):
    model, tokenizer = make_model(), make_tokenizer()
    generate, shapes = model.generate, []
    monkeypatch.setattr(
        model, "generate", lambda **inputs: shapes.append(inputs["input_ids"].shape) or generate(**inputs)
    )
    rows = [row(1), row(1, 4, 5, 6), row(1, 9), row(1, 4, 5, 6, 7), row(1, 5, 6)]
    whole, parts = (
        TransformersRollouts(tokenizer, max_new_tokens=6, temperature=0.0, batch_size=size) for size in (None, 2)
    )
    assert parts(model, rows, seed=0) == whole(model, rows, seed=0)
    assert shapes == [(2, 5), (2, 3), (1, 1), (5, 5)]
    sampled = TransformersRollouts(tokenizer, max_new_tokens=6, batch_size=2)
    assert sampled(model, rows, seed=3) == sampled(model, rows, seed=3)


def test_completions_end_with_their_first_eos_where_pad_is_eos():
    model = make_model(pad_token_id=2)
    model.generation_config.eos_token_id = [2, 3]  # several; the tokenizer names only the first
    tokenizer = make_tokenizer(pad_token="<eos>")
    completions = TransformersRollouts(tokenizer, max_new_tokens=12)(model, [row(1, 4)] * 64, seed=0)
    assert len({len(ids) for ids in completions}) > 1
    for ids in completions:
        ends = [position for position, token in enumerate(ids) if token in (2, 3)]
        assert ends == [len(ids) - 1] or (ends == [] and len(ids) == 12)
    assert {ids[-1] for ids in completions} >= {2, 3}


def test_padded_columns_of_the_head_are_never_sampled():
    model, tokenizer = make_model(vocab_size=40), make_tokenizer()
    completions = TransformersRollouts(tokenizer, max_new_tokens=8, vocab_size=22)(model, [row(1, 4)] * 64, seed=0)
    assert {token for ids in completions for token in ids} <= set(range(22))


def test_logits_that_are_not_finite_end_sampling_in_words():
    model = make_model()
    own_config = model.generation_config
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(FloatingPointError, match="the student's logits are not finite"):
        TransformersRollouts(make_tokenizer(), max_new_tokens=4)(model, [{"prompt_ids": [1, 5]}], seed=0)
    assert model.generation_config is own_config and model.training


def test_stop_ids_and_padding():
    model, tokenizer = make_model(), make_tokenizer()
    assert stop_token_ids(model, tokenizer) == [2]
    model.generation_config.eos_token_id = [3]
    assert stop_token_ids(model, tokenizer) == [3, 2]
    model.generation_config.eos_token_id = None
    bare = make_tokenizer(eos_token=None, pad_token=None)
    with pytest.raises(ValueError, match=r"set tokenizer\.eos_token"):
        stop_token_ids(model, bare)
    assert pad_id(tokenizer, [2]) == 0
    assert pad_id(bare, [2]) == 2
    assert cut_after_eos([5, 3, 2], {2, 3}) == [5, 3]


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"batch_size": 0}]
)
def test_settings_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TransformersRollouts(make_tokenizer(), **options)

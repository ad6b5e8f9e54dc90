"""Rollouts: exactly the stated distribution, clean ends, and prompts read with good errors."""

import json

import pytest
import torch

from potstill.rollouts.dataset import read_jsonl, tokenize
from potstill.rollouts.transformers import TransformersRollouts, cut_after_eos, pad_id, stop_token_ids
from train_fixtures import CHAT_TEMPLATE, make_model, make_tokenizer


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


# -- prompts ----------------------------------------------------------------------------------------------------


def test_read_jsonl(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [{"prompt": "a b"}, {"messages": [{"role": "user", "content": "c"}], "answer": "d", "source": "web"}]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    assert read_jsonl(path) == rows
    assert read_jsonl(path, limit=1) == rows[:1]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "a"', r"line 2: Expecting ',' delimiter"),
        ("[1]", "line 2: expected a JSON object"),
        ('{"text": "a"}', "line 2: expected exactly one of `prompt` and `messages`; the keys are text"),
        ('{"prompt": "a", "messages": []}', "line 2: expected exactly one"),
        ('{"prompt": 3}', "line 2: `prompt` is 3; expected text"),
        ('{"messages": [{"role": "user"}]}', "line 2: `messages` must be a list of objects with `role` and `content`"),
        ('{"prompt": "a", "answer": 7}', "line 2: `answer` is 7; expected text: put it in quotes"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"p\.jsonl, {message}"):
        read_jsonl(path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        read_jsonl(tmp_path / "p.jsonl")


def test_tokenize_prompts_and_chats():
    tokenizer = make_tokenizer()
    assert tokenize([{"prompt": "a b", "answer": "c"}], tokenizer, 9) == [
        {"prompt_ids": [1, 4, 5], "answer": "c", "completion_ids": None}
    ]
    chat = [{"messages": [{"role": "user", "content": "c"}]}]
    with pytest.raises(ValueError, match="it has no chat template"):
        tokenize(chat, tokenizer, 9)
    with pytest.raises(ValueError, match="the tokenizer refuses 'a z': WordLevel error"):
        tokenize([{"prompt": "a z"}], tokenizer, 9)
    tokenizer.chat_template = CHAT_TEMPLATE
    (prompt,) = tokenize(chat, tokenizer, 9)
    assert tokenizer.decode(prompt["prompt_ids"], skip_special_tokens=True) == "a c b"  # b: the assistant's turn
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ValueError, match=r"the tokenizer refuses \[.*\]: no such role"):
        tokenize(chat, tokenizer, 9)


def test_long_prompts_are_left_out():
    tokenizer = make_tokenizer()
    rows = [{"prompt": "a b c"}, {"prompt": "a"}]
    assert [row["prompt_ids"] for row in tokenize(rows, tokenizer, 3)] == [[1, 4]]
    with pytest.raises(ValueError, match="all 2 prompts have more than 1 tokens; raise max_prompt_tokens"):
        tokenize(rows, tokenizer, 1)

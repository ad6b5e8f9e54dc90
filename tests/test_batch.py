"""The one shift, by hand: which rows are scored, and what each of them predicts."""

import pytest
import torch

from potstill.train.batch import batch_for, make_batch
from train_fixtures import make_model, make_tokenizer

EOS, PAD = 2, 0


def test_layout_by_hand():
    batch = make_batch([[5, 6], [7]], [[8, EOS], [9, 8, 9]], eos_token_ids=[EOS], pad_token_id=PAD)
    assert batch["input_ids"].tolist() == [[5, 6, 8, EOS], [7, 9, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    # Row s predicts token s + 1: the last prompt token is the first scored row, the last token is none.
    assert batch["score_mask"].tolist() == [[False, True, True, False], [True, True, True, False]]
    assert batch["scored_rows"].tolist() == [1, 2, 4, 5, 6]
    assert batch["target_ids"].tolist() == [8, EOS, 9, 8, 9]


def test_prompt_and_padding_are_not_scored():
    # A prompt of 2, a completion of 2 and padding: exactly 2 scored rows (the padding is from the longer row).
    batch = make_batch([[5, 6], [5] * 6], [[7, 8], [7]], eos_token_ids=[EOS], pad_token_id=PAD)
    assert batch["score_mask"][0].tolist() == [False, True, True, False, False, False, False]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("pad", [PAD, EOS], ids=["pad is its own token", "pad is EOS"])
def test_first_eos_is_scored_and_nothing_after_it(pad):
    batch = make_batch([[5], [5]], [[7, EOS, EOS, 9], [7, 8, 9, 7]], eos_token_ids=[EOS], pad_token_id=pad)
    assert batch["score_mask"].tolist() == [[True, True, False, False, False], [True, True, True, True, False]]
    assert batch["target_ids"].tolist() == [7, EOS, 7, 8, 9, 7]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0]
    assert batch["input_ids"][0].tolist() == [5, 7, EOS, pad, pad]


def test_the_first_of_several_eos_ids_ends():
    batch = make_batch([[5], [5]], [[7, 3, EOS], [EOS, 3]], eos_token_ids=[EOS, 3], pad_token_id=PAD)
    assert batch["target_ids"].tolist() == [7, 3, EOS]


def test_eos_in_the_prompt_ends_nothing():
    batch = make_batch([[EOS, 5, EOS, 6]], [[7, 8]], eos_token_ids=[EOS], pad_token_id=EOS)
    assert batch["scored_rows"].tolist() == [3, 4]
    assert batch["attention_mask"].tolist() == [[1] * 6]


def test_a_completion_cut_by_its_length_is_scored_whole():
    batch = make_batch([[5, 6]], [[7, 8, 9]], eos_token_ids=[EOS], pad_token_id=PAD)
    assert batch["target_ids"].tolist() == [7, 8, 9]


def test_empty_completions_are_not_scored():
    batch = make_batch([[5, 6], [5]], [[], []], eos_token_ids=[EOS], pad_token_id=PAD)
    assert not batch["score_mask"].any()
    assert batch["scored_rows"].shape == batch["target_ids"].shape == (0,)
    assert batch["scored_rows"].dtype == torch.int64


def test_what_is_refused():
    with pytest.raises(ValueError, match="prompt 1 is empty; begin it with the tokenizer's BOS"):
        make_batch([[5], []], [[7], [8]], eos_token_ids=[EOS], pad_token_id=PAD)
    with pytest.raises(ValueError, match="2 prompts but 1 completions"):
        make_batch([[5], [6]], [[7]], eos_token_ids=[EOS], pad_token_id=PAD)


def test_what_a_batch_was_made_from():
    rows = [
        {"prompt_ids": [5, 6], "answer": None, "completion_ids": None, "weight": 0.5},
        {"prompt_ids": [7], "answer": "x", "completion_ids": None},
    ]
    batch = batch_for(make_model(), make_tokenizer(), rows, [[8, 9, EOS, 4], [4]])
    assert batch["rows"] == rows
    assert batch["completions"] == [[8, 9, EOS], [4]]
    assert batch["token_weights"].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert batch_for(make_model(), make_tokenizer(), rows[1:], [[4]])["token_weights"] is None

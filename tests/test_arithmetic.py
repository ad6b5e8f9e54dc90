"""The embedded recipe: its task, its tokenizer and the packaged teacher."""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import potstill.arithmetic
from potstill.arithmetic import build, task

FOLDER = Path(potstill.arithmetic.__file__).parent
TEACHER = FOLDER / "teacher"
WEIGHTS = TEACHER / "model.safetensors"


def test_problems_are_worked_out_correctly():
    for row in task.problems("train", 500):
        a, operator, b, result, answer = re.search(
            r"(\d+) ([+-]) (\d+) = (\d+) \. answer (\d+)$", row["answer"]
        ).groups()
        assert int(result) == (int(a) + int(b) if operator == "+" else int(a) - int(b)) and answer == result
        assert re.findall(r"\d+", row["prompt"]) == [a, b]
        assert ("gets" in row["prompt"]) == (operator == "+")


def test_problems_depend_on_their_arguments_alone():
    assert task.problems("train", 50) == task.problems("train", 80)[:50]
    assert task.problems("train", 50, seed=1) != task.problems("train", 50)


def test_no_name_and_item_are_together_in_both_splits():
    pairs = {
        split: {tuple(row["prompt"].split()[position] for position in (0, 3)) for row in task.problems(split, 20_000)}
        for split in ("train", "heldout")
    }
    assert len(pairs["train"]) > 15_000 and len(pairs["heldout"]) > 10_000
    assert not pairs["train"] & pairs["heldout"]


def test_every_word_occurs_in_both_splits():
    for split in ("train", "heldout"):
        seen = {word for row in task.problems(split, 20_000) for text in row.values() for word in text.split()}
        missing = set(task.tokenizer().get_vocab()) - set(task.SPECIAL) - seen
        assert missing <= {"39", "40"}  # no sum of two numbers up to 19


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split is 'test'"):
        task.problems("test", 1)


def test_the_tokenizer_round_trips_with_one_token_per_word():
    words = task.tokenizer()
    assert len(words) >= 1_000
    for row in task.problems("heldout", 200):
        prompt = words(row["prompt"]).input_ids
        answer = words(row["answer"], add_special_tokens=False).input_ids
        assert prompt[0] == words.bos_token_id and len(prompt) == 1 + len(row["prompt"].split())
        assert words.decode(prompt, skip_special_tokens=True) == row["prompt"]
        assert words.decode(answer) == row["answer"]
    for number in range(41):
        assert len(words(str(number), add_special_tokens=False).input_ids) == 1


def test_an_unknown_word_is_an_error():
    with pytest.raises(Exception, match="UNK"):
        task.tokenizer()("Miran has 3 bananas")


def test_the_packaged_tokenizer_is_the_task_s():
    packaged = AutoTokenizer.from_pretrained(TEACHER)
    assert packaged.get_vocab() == task.tokenizer().get_vocab()
    prompt = task.problems("heldout", 1)[0]["prompt"]
    assert packaged(prompt).input_ids == task.tokenizer()(prompt).input_ids


def test_the_packaged_weights_are_those_of_the_build():
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() == build.SHA256
    assert sum(file.stat().st_size for file in TEACHER.iterdir()) <= 5_000_000


def test_the_packaged_teacher_solves_held_out_problems():
    words, model = AutoTokenizer.from_pretrained(TEACHER), AutoModelForCausalLM.from_pretrained(TEACHER)
    answer_regex = yaml.safe_load((FOLDER / "recipe.yaml").read_text())["data"]["answer_regex"]
    rows = task.problems("heldout", 512, seed=1)
    prompts = words([row["prompt"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        completions = model.generate(**prompts, max_new_tokens=14, do_sample=False)[:, prompts.input_ids.shape[1] :]
    texts = words.batch_decode(completions, skip_special_tokens=True)
    given = [re.findall(answer_regex, text)[-1:] for text in texts]
    right = [re.findall(answer_regex, row["answer"]) for row in rows]
    assert sum(map(list.__eq__, given, right)) / len(rows) >= 0.95


def rebuild(out, steps):
    code = f"import pathlib, potstill.arithmetic.build as b; b.build(pathlib.Path({str(out)!r}), {steps})"
    subprocess.run([sys.executable, "-c", code], check=True)  # a process of its own: it sets threads and seeds
    return (out / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_rebuild_repeats_itself_bit_for_bit(tmp_path):
    assert rebuild(tmp_path / "first", steps=20) == rebuild(tmp_path / "second", steps=20)

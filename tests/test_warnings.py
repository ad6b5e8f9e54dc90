"""Warnings in words: each fires when it should, once, and is silent when all is well."""

import math

import pytest
import torch

from potstill import LogitTransform, TeacherTopK
from potstill.teachers.local import LocalTeacher
from potstill.train.losses import topk_loss
from potstill.train.watch import Watch, eos_mismatch, mostly_zero, over_confident, random_teacher, uniform_teacher
from test_trainer import ROWS, TOKENIZER, make_trainer
from train_fixtures import make_model

HEALTHY = {"loss": 0.5, "student_mass": 0.9, "teacher_mass": 0.95, "zero_loss_share": 0.1}
HEALTHY |= {"uniform_teacher_share": 0.0, "sampled": 50.0, "truncated_share": 0.2}


@pytest.mark.parametrize(
    "check, row, fires",
    [
        # The teacher leaves 5 % to other tokens: a quarter of it is 1.25 %.
        (over_confident, {"student_mass": 0.989, "teacher_mass": 0.95}, True),
        (over_confident, {"student_mass": 0.986, "teacher_mass": 0.95}, False),
        # It leaves them 0.5 %: too little to measure a student by.
        (over_confident, {"student_mass": 1.0, "teacher_mass": 0.995}, False),
        (over_confident, {}, False),
        (mostly_zero, {"zero_loss_share": 0.51}, True),
        (mostly_zero, {"zero_loss_share": 0.5}, False),
        (mostly_zero, {}, False),
        (uniform_teacher, {"uniform_teacher_share": 0.011}, True),
        (uniform_teacher, {"uniform_teacher_share": 0.01}, False),
        (uniform_teacher, {}, False),
    ],
)
def test_thresholds_on_a_row(check, row, fires):
    message = check(row)
    assert (message is not None) == fires
    if fires:
        assert "%" in message


def test_each_kind_is_shown_once(capsys):
    watch = Watch()
    watch.look(HEALTHY)
    assert capsys.readouterr().out == ""
    for _ in range(3):
        watch.look({**HEALTHY, "student_mass": 0.999, "zero_loss_share": 0.9, "uniform_teacher_share": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("warning: ") for line in lines)
    assert "the student gives 99.9% to the tokens that the teacher gives 95.0%" in lines[0]
    assert "the loss is exactly 0 on 90% of the tokens" in lines[1]
    assert "100.0% of the teacher's rows give all their tokens the same probability" in lines[2]


@pytest.mark.parametrize(
    "shares, fires",
    [
        ([0.1, 0.1, 0.2, 0.3, 0.36], True),
        ([0.6, 0.1, 0.36], True),  # compared with the lowest so far
        ([0.9, 0.9, 0.9], False),  # long, but not rising
        ([0.1, 0.2, 0.3, 0.34], False),
    ],
)
def test_a_rising_truncated_share(capsys, shares, fires):
    watch = Watch()
    for share in shares:
        for _ in range(2):  # two rows of 50 completions are one reading
            watch.look({**HEALTHY, "truncated_share": share})
    out = capsys.readouterr().out
    assert (
        "36% of the student's completions reach rollout.max_new_tokens without an end, up from 10%" in out
    ) == fires
    assert fires or out == ""


def test_a_few_completions_say_nothing(capsys):
    watch = Watch()
    for share in (0.0, 1.0, 0.0, 1.0) * 6:  # four at a time: their readings are all one half
        watch.look({**HEALTHY, "sampled": 4.0, "truncated_share": share})
    assert capsys.readouterr().out == ""


def test_end_tokens_that_differ():
    student, teacher = make_model(), make_model(seed=1)
    assert eos_mismatch(student, teacher, TOKENIZER) is None
    teacher.generation_config.eos_token_id = [2, 3]
    message = eos_mismatch(student, teacher, TOKENIZER)
    assert "completions end at '<eos>' (2), the teacher's at '<eos>' (2), '<end>' (3)" in message
    student.generation_config.eos_token_id = [3]  # the tokenizer's own is always among them
    assert eos_mismatch(student, teacher, TOKENIZER) is None


def local(model):
    return LocalTeacher(model, LogitTransform(), top_k=4)


def trained_on(rows, steps=60):
    """A model that has seen the rows' completions and nothing else."""
    model = make_model(seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        for row in rows:
            ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            log_probs = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1].log_softmax(-1)
            loss = -log_probs.gather(1, torch.tensor(row["completion_ids"])[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def test_a_teacher_of_random_weights():
    # Weights as small as those of a fresh model: every row is nearly uniform, and a token costs ln 22 = 3.09 nats.
    message = random_teacher(local(make_model(initializer_range=0.02)), ROWS, TOKENIZER)
    assert "the teacher needs 3.11 nats per token" in message and "costs 3.09" in message
    # A teacher of completions may find their prompts absurd, and the other way round: either will do.
    rows = [{**row, "completion_ids": [6, 7, 8, 2]} for row in ROWS[:3]]
    assert random_teacher(local(trained_on(rows)), rows, TOKENIZER) is None
    answers = [{"prompt_ids": row["prompt_ids"], "answer": "c d e <eos>", "completion_ids": None} for row in rows]
    assert random_teacher(local(trained_on(rows)), answers, TOKENIZER) is None
    reversed_rows = [{"prompt_ids": [*row["prompt_ids"], 6, 7, 8, 2], "answer": None} for row in rows]
    assert random_teacher(local(trained_on(rows)), reversed_rows, TOKENIZER) is None
    # Of one token without an answer nothing can be said.
    assert random_teacher(local(make_model()), [{"prompt_ids": [1], "answer": None}], TOKENIZER) is None


def warnings_of(folder, capsys, **options):
    trainer = make_trainer(folder, learning_rate=0.0, **options)
    trainer.train()
    log = next(log for log in trainer.state.log_history if "loss" in log)
    return log, [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


def test_the_trainer_looks_at_its_rows(tmp_path, capsys):
    """The shares in the log rows are what they say, and reach the warnings."""
    good = local(make_model(seed=1, hidden=24).double())

    def flat(batch):
        rows = good(batch)
        log_probs = rows.log_probs.clone()
        log_probs[::2] = math.log(1 / 22)
        return TeacherTopK(rows.token_ids, log_probs, None)

    def halves(model, rows, *, seed):
        return [[5, 2] if index % 4 else [5, 6] for index, _ in enumerate(rows)]

    log, given = warnings_of(tmp_path, capsys, teacher=good, rollouts=halves)
    assert log["uniform_teacher_share"] == log["zero_loss_share"] == 0.0
    assert log["truncated_share"] == 0.25 and log["sampled"] == 8 and log["mean_length"] == 2.0
    assert not [line for line in given if "random" not in line]  # it is random, and the data's text nonsense to it
    log, given = warnings_of(tmp_path, capsys, teacher=flat, rollouts=halves)
    assert log["uniform_teacher_share"] == 0.5
    assert len(given) == 1 and "the same probability" in given[0]


def test_the_trainer_sees_a_loss_of_nothing_and_an_over_confident_student(tmp_path, capsys):
    def sure(batch):  # of ids 4 and 5, which get 0.5 and 0.4 of the teacher
        token_ids = torch.tensor([[4, 5]]).expand(len(batch["scored_rows"]), 2)
        return TeacherTopK(token_ids, torch.tensor([[0.5, 0.4]]).log().expand_as(token_ids).double(), None)

    def mostly_nothing(logits, batch, *, num_tokens, transform):
        output = topk_loss(logits, batch, num_tokens=num_tokens, transform=transform)
        masses = {"student_mass": torch.tensor(0.99), "teacher_mass": torch.tensor(0.9)}
        return output._replace(
            per_token=output.per_token * (torch.arange(len(output.per_token)) % 4 == 0),
            metrics=output.metrics | masses,
        )

    log, given = warnings_of(tmp_path, capsys, teacher=sure, loss=mostly_nothing)
    assert log["zero_loss_share"] > 0.5
    assert len(given) == 2 and "99.0% to the tokens that the teacher gives 90.0%" in given[0]
    assert "the loss is exactly 0 on" in given[1]


def test_the_trainer_compares_ends_at_the_start(tmp_path, capsys):
    teacher = make_model(seed=1, hidden=24).double()
    teacher.generation_config.eos_token_id = [2, 3]
    _, given = warnings_of(tmp_path, capsys, teacher=local(teacher))
    assert any("the teacher's at '<eos>' (2), '<end>' (3)" in line for line in given)

"""The trainer against dense PyTorch: losses, gradients, normalisation, resuming, measuring."""

import json
import math
from collections import Counter
from itertools import chain
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils

from potstill import LinearLogits, LogitTransform, TeacherTopK
from potstill.core import passes
from potstill.rollouts.transformers import TransformersRollouts
from potstill.teachers.local import LocalTeacher, ScoredModel, check_same_tokenizer
from potstill.teachers.one_hot import one_hot_teacher
from potstill.train import DistillationTrainer
from potstill.train.heldout import extract_answer
from potstill.train.losses import full_vocab_loss, topk_loss
from potstill.train.meter import StepMeter
from train_fixtures import make_model, make_tokenizer

PLAIN = LogitTransform()
ROWS = [{"prompt_ids": [1, 4 + i % 8, *range(5, 5 + i % 3)], "answer": f"a {i % 3}"} for i in range(8)]
TOKENIZER = make_tokenizer()
OWN_OPTIONS = ("train_dataset", "eval_dataset", "loss", "answer_regex", "lmbda", "max_skipped_steps", "callbacks")


def arguments(folder, **options) -> TrainingArguments:
    defaults = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    defaults |= {"max_steps": 2, "per_device_train_batch_size": 8, "logging_steps": 1, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), use_cpu=True, disable_tqdm=True, **{**defaults, **options})


def make_trainer(folder, model=None, teacher=None, rollouts=None, **options) -> DistillationTrainer:
    own = {name: options.pop(name) for name in OWN_OPTIONS if name in options}
    return DistillationTrainer(
        model or make_model().double(),
        arguments(folder, **options),
        teacher=teacher or LocalTeacher(make_model(seed=1, hidden=24).double(), PLAIN, top_k=4),
        rollouts=rollouts or TransformersRollouts(TOKENIZER, max_new_tokens=6),
        processing_class=TOKENIZER,
        **{"train_dataset": ROWS, **own},
    )


def step_batches(trainer, *micro_batches):
    return trainer.get_batch_samples(iter(micro_batches), len(micro_batches), torch.device("cpu"))


def dense_loss(student, teacher, batch, top_k=4, divergence="forward_kl", tail="bucket"):
    """Sum over scored rows of the divergence on the teacher's top k and one bucket for all other tokens."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    q = student(**inputs).logits[batch["score_mask"]].log_softmax(-1)
    with torch.no_grad():
        p = teacher(**inputs).logits[batch["score_mask"]].log_softmax(-1)
    ids = p.topk(top_k).indices
    p, q = (x.gather(1, ids).exp() for x in (p, q))
    if tail == "bucket":
        p, q = (torch.cat([x, 1 - x.sum(1, keepdim=True)], 1) for x in (p, q))
    return ((p * (p / q).log()) if divergence == "forward_kl" else (q * (q / p).log())).sum()


@pytest.mark.parametrize(
    "divergence, tail", [("forward_kl", "bucket"), ("reverse_kl", "bucket"), ("forward_kl", "drop")]
)
def test_compute_loss_and_gradients_equal_a_dense_computation(tmp_path, divergence, tail):
    def loss(logits, batch, **options):
        assert logits.hidden.shape == (len(batch["target_ids"]), 16)  # the vocabulary is met on scored rows only
        return topk_loss(logits, batch, divergence=divergence, tail=tail, **options)

    trainer = make_trainer(tmp_path, loss=loss)
    student, teacher = trainer.student.model, trainer.teacher.model
    (batch,), num_tokens = step_batches(trainer, ROWS)
    assert num_tokens == batch["score_mask"].sum() > 8
    expected = dense_loss(student, teacher, batch, divergence=divergence, tail=tail) / num_tokens
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    got = trainer.compute_loss(student, batch, num_items_in_batch=num_tokens)
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-12, msg=name)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_the_teacher_gives_the_scored_rows_of_its_dense_logits(tmp_path):
    trainer = make_trainer(tmp_path)
    (batch,), _ = step_batches(trainer, ROWS)
    dense = trainer.teacher.model(batch["input_ids"], batch["attention_mask"]).logits[batch["score_mask"]]
    top = dense.log_softmax(-1).topk(4)
    assert torch.equal(batch["teacher"].token_ids, top.indices)
    torch.testing.assert_close(batch["teacher"].log_probs, top.values, rtol=1e-12, atol=1e-14)
    rest = dense.log_softmax(-1).scatter(1, top.indices, -torch.inf).logsumexp(1)
    torch.testing.assert_close(batch["teacher"].rest_log_prob, rest, rtol=1e-12, atol=1e-14)


def test_how_a_step_is_cut_into_micro_batches_changes_nothing(tmp_path):
    weights, losses = [], []
    for size in (8, 4, 1):
        trainer = make_trainer(
            tmp_path / str(size), per_device_train_batch_size=size, gradient_accumulation_steps=8 // size
        )
        trainer.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    start = torch.cat([parameter.detach().flatten() for parameter in make_model().double().parameters()])
    assert (weights[0] - start).abs().max() > 1e-3
    for other, loss in zip(weights[1:], losses[1:], strict=True):
        torch.testing.assert_close(other, weights[0], rtol=0, atol=1e-12)
        assert loss == pytest.approx(losses[0], rel=1e-6)


def test_a_micro_batch_without_scored_tokens_contributes_an_exact_zero(tmp_path):
    def rollouts(model, rows, *, seed):
        return [[] if row is ROWS[0] else [5, 2] for row in rows]

    trainer = make_trainer(tmp_path, rollouts=rollouts)
    (empty, full), num_tokens = step_batches(trainer, ROWS[:1], ROWS[1:3])
    assert num_tokens == 4
    loss = trainer.compute_loss(trainer.model, empty, num_items_in_batch=num_tokens)
    assert loss == 0 and loss.requires_grad
    loss.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trainer.model.parameters())
    assert trainer.compute_loss(trainer.model, full, num_items_in_batch=num_tokens) > 0
    # The same holds for a whole step without a token.
    (empty,), num_tokens = step_batches(trainer, ROWS[:1])
    assert num_tokens == 0
    assert trainer.compute_loss(trainer.model, empty, num_items_in_batch=num_tokens) == 0


def test_return_outputs_gives_the_same_loss(tmp_path):
    trainer = make_trainer(tmp_path)
    (batch,), n = step_batches(trainer, ROWS)
    loss, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True, num_items_in_batch=n)
    assert loss == trainer.compute_loss(trainer.model, batch, num_items_in_batch=n)
    assert outputs.logits.numel() == 0


def test_training_follows_the_teacher_and_logs(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=30, learning_rate=0.02, optim="adamw_torch", eval_dataset=ROWS)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_kl"] < before["eval_kl"] / 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 31))
    assert {row["phase"] for row in rows} == {"distil"}
    last = steps[-1]
    assert last["loss"] < steps[0]["loss"]
    assert 0 < last["student_mass"] < 1 and 0 < last["teacher_mass"] < 1
    assert last["student_mass"] > steps[0]["student_mass"]
    assert last["tokens_per_second"] > 0
    assert all(last[f"{part}_seconds"] > 0 for part in ("rollout", "teacher", "student", "loss"))
    assert [row["eval_kl"] for row in rows if "eval_kl" in row] == [before["eval_kl"], after["eval_kl"]]


def test_logged_masses_are_means_over_tokens_and_steps(tmp_path):
    trainer = make_trainer(
        tmp_path, logging_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=0.0
    )
    seen = []
    score = trainer.teacher.__call__
    trainer.teacher = lambda batch: seen.append(score(batch)) or seen[-1]
    trainer.train()
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    per_step = [torch.cat([rows.log_probs.exp().sum(1) for rows in seen[i : i + 4]]).mean() for i in (0, 4)]
    assert log["teacher_mass"] == pytest.approx(torch.stack(per_step).mean().item(), rel=1e-6)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    options |= {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "lr_scheduler_type": "linear"}

    def student():
        return make_model(attention_dropout=0.2)

    whole = make_trainer(tmp_path, model=student(), **options)
    whole.train()
    resumed = make_trainer(tmp_path, model=student(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for ours, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_one_hot_teacher_makes_the_loss_a_cross_entropy(tmp_path):
    def answers(model, rows, *, seed):
        return [[*TOKENIZER(row["answer"], add_special_tokens=False).input_ids, 2] for row in rows]

    trainer = make_trainer(tmp_path, teacher=one_hot_teacher, rollouts=answers)
    (batch,), num_tokens = step_batches(trainer, ROWS)
    logits = trainer.model(batch["input_ids"], batch["attention_mask"]).logits[batch["score_mask"]]
    targets = torch.tensor(list(chain(*answers(None, ROWS, seed=0))))
    got = trainer.compute_loss(trainer.model, batch, num_items_in_batch=num_tokens)
    torch.testing.assert_close(got, cross_entropy(logits, targets), rtol=1e-12, atol=0)


def test_evaluate_measures_what_it_says(tmp_path):
    trainer = make_trainer(tmp_path, eval_dataset=ROWS, answer_regex=r"a (\d)", per_device_eval_batch_size=8)
    metrics = trainer.evaluate()
    student, teacher = trainer.student.model, trainer.teacher.model
    completions = trainer.rollouts(student, ROWS, seed=trainer.seed_of("heldout"))
    batch = trainer._batch(ROWS, completions)
    q, p = (
        model(batch["input_ids"], batch["attention_mask"]).logits[batch["score_mask"]].log_softmax(-1)
        for model in (student, teacher)
    )
    assert metrics["eval_tokens"] == len(q)
    expected = {"kl": p.exp() * (p - q), "student_entropy": -q.exp() * q, "teacher_entropy": -p.exp() * p}
    for name, value in expected.items():
        assert metrics[f"eval_{name}"] == pytest.approx(value.sum(1).mean().item(), rel=1e-5), name
    assert 0 <= metrics["eval_exact_match"] < 1
    # Greedy completions as answers are all right; rows without answers are not graded.
    greedy = TransformersRollouts(TOKENIZER, max_new_tokens=6, temperature=0.0)
    texts = TOKENIZER.batch_decode(greedy(student, ROWS, seed=0), skip_special_tokens=True)
    right = [{**row, "answer": text} for row, text in zip(ROWS, texts, strict=True)]
    assert trainer.evaluate([*right[:4], {**ROWS[0], "answer": None}])["eval_exact_match"] == 1.0
    assert "eval_exact_match" not in trainer.evaluate([{**ROWS[0], "answer": None}])


def test_extract_answer():
    assert extract_answer(" so 3 . answer 7 ", r"answer (\d+)") == "7"
    assert extract_answer("answer 6 no answer 7", r"answer (\d+)") == "7"
    assert extract_answer(" 7 ", r"answer (\d+)") == "7"
    assert extract_answer(" seven \n", None) == "seven"


def test_evaluation_leaves_training_untouched(tmp_path):
    weights = []
    for strategy in ("no", "steps"):
        options = {"eval_strategy": strategy, "eval_steps": 1, "eval_dataset": ROWS, "per_device_train_batch_size": 4}
        trainer = make_trainer(tmp_path / strategy, model=make_model(attention_dropout=0.2), **options)
        trainer.train()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]))
    assert torch.equal(*weights)
    assert sum("eval_kl" in log for log in trainer.state.log_history) == 2


def test_saved_models_are_ordinary(tmp_path):
    from transformers import AutoModelForCausalLM

    for tied in (False, True):
        trainer = make_trainer(tmp_path, model=make_model(tie_word_embeddings=tied))
        trainer.train()
        trainer.save_model()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(loaded.lm_head) is torch.nn.Linear
        ids = torch.tensor([[1, 4, 5, 6]])
        assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)
        assert loaded.state_dict().keys() == make_model(tie_word_embeddings=tied).state_dict().keys()
        assert loaded.config.use_cache == trainer.args.use_cache


def test_mixed_precision_runs(tmp_path):
    trainer = make_trainer(
        tmp_path, model=make_model(), teacher=LocalTeacher(make_model(seed=1), PLAIN, 4), bf16=True, eval_dataset=ROWS
    )
    before = trainer.evaluate()
    trainer.train()
    assert trainer.model.lm_head.weight.dtype == torch.float32
    assert trainer.evaluate()["eval_kl"] < before["eval_kl"]


def test_callbacks_and_plain_functions_fit_in(tmp_path):
    class Counter(TrainerCallback):
        steps = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1

    counter = Counter()
    teacher = LocalTeacher(make_model(seed=1), PLAIN, 4)
    trainer = DistillationTrainer(
        make_model(),
        arguments(tmp_path),
        teacher=lambda batch: teacher(batch),
        rollouts=lambda model, rows, *, seed: [[5, 6, 2] for _ in rows],
        train_dataset=ROWS,
        processing_class=TOKENIZER,
        callbacks=[counter],
    )
    assert isinstance(trainer, Trainer)
    trainer.train()
    assert counter.steps == 2
    with pytest.raises(ValueError, match="evaluate needs held-out rows"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="evaluate needs a LocalTeacher"):
        trainer.evaluate(ROWS)


def test_what_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"training\.label_smoothing_factor=0\.1 is not supported: there are no labels"
    ):
        make_trainer(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="top_k is 99; expected 1 to 22"):
        LocalTeacher(make_model(), PLAIN, top_k=99)
    poisoned = make_trainer(tmp_path)
    poisoned.teacher.model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"the teacher cannot be right: .*NaN"):
        step_batches(poisoned, ROWS)


def test_tokenizers_are_compared_by_their_ids():
    words = list(make_tokenizer().get_vocab())
    words.sort(key=make_tokenizer().get_vocab().get)
    check_same_tokenizer(make_tokenizer(words), make_tokenizer(words))
    swapped = [*words[:4], words[5], words[4], *words[6:]]  # equal sizes mean nothing
    with pytest.raises(ValueError, match="token 'a' has id 5 in the student and 4 in the teacher"):
        check_same_tokenizer(make_tokenizer(swapped), make_tokenizer(words))
    with pytest.raises(ValueError, match="token 'z' has id 22 in the student and None in the teacher"):
        check_same_tokenizer(make_tokenizer([*words, "z"]), make_tokenizer(words))


OWN = [{**row, "completion_ids": [6, 7, 4 + i, 2]} for i, row in enumerate(ROWS)]


@pytest.mark.parametrize("lmbda", [0.0, 0.3, 1.0])
def test_lmbda_is_the_share_of_rows_that_the_student_completes(tmp_path, lmbda):
    sampled = []

    def rollouts(model, rows, *, seed):
        sampled.append(len(rows))
        return [[5, 2] for _ in rows]

    trainer = make_trainer(tmp_path, rollouts=rollouts, train_dataset=OWN, lmbda=lmbda, max_steps=25, logging_steps=25)
    steps = []
    complete = trainer._complete
    trainer._complete = lambda rows, step: steps.append((rows, complete(rows, step))) or steps[-1][1]
    trainer.train()
    rows = [(row, text) for rows, texts in steps for row, text in zip(rows, texts, strict=True)]
    own = [text == row["completion_ids"] for row, text in rows]
    assert len(rows) == 200 and all(is_own or text == [5, 2] for is_own, (_, text) in zip(own, rows, strict=True))
    assert own.count(False) == sum(sampled)
    assert (len({tuple(own[i : i + 8]) for i in range(0, 200, 8)}) > 1) == (lmbda == 0.3)  # a new coin every step
    assert {0.0: sum(sampled) == 0, 0.3: 40 <= sum(sampled) <= 80, 1.0: sum(sampled) == 200}[lmbda]
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    assert log["on_policy_share"] == pytest.approx(sum(sampled) / 200)
    assert log["mean_length"] == pytest.approx(2 * sum(sampled) / 200 + 4 * own.count(True) / 200)


def test_a_teacher_that_cannot_be_right_ends_the_run_in_words(tmp_path):
    def broken(batch):
        n = len(batch["scored_rows"])
        return TeacherTopK(torch.arange(2).expand(n, 2), torch.full((n, 2), float("nan")))

    with pytest.raises(FloatingPointError, match=r"step 1: the teacher cannot be right: .*NaN"):
        make_trainer(tmp_path, teacher=broken).train()


def test_rows_without_a_completion_are_refused_at_the_start(tmp_path):
    rows = [*OWN[:3], {**ROWS[3], "completion_ids": None}, *OWN[4:]]
    with pytest.raises(ValueError, match=r"lmbda is 0\.5, but row 3 of train_dataset has no completion of its own"):
        make_trainer(tmp_path, train_dataset=rows, lmbda=0.5)
    make_trainer(tmp_path, train_dataset=rows, lmbda=1.0)
    with pytest.raises(ValueError, match=r"lmbda is 1\.5; expected a probability"):
        make_trainer(tmp_path, lmbda=1.5)


def poisoned_loss(steps, trainer_of, *, gradient_only=False):
    """The loss, of which in these steps the second micro-batch's value or gradient alone is NaN."""
    calls = Counter()

    def loss(logits, batch, **options):
        output = topk_loss(logits, batch, **options)
        step = trainer_of[0].state.global_step + 1
        calls[step] += 1
        if step not in steps or calls[step] != 2:
            return output
        if gradient_only:  # the square root of 0 has an infinite slope, and 0 times that is NaN
            return output._replace(loss=output.loss + (0 * output.loss).sqrt())
        metrics = {name: value * torch.nan for name, value in output.metrics.items()}
        return output._replace(loss=output.loss * torch.nan, metrics=metrics)

    return loss


class Weights(TrainerCallback):
    def __init__(self):
        self.after = []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
        self.after.append([*[parameter.detach().clone() for parameter in model.parameters()], *moments])


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("gradient_only", [False, True])
def test_a_step_that_is_not_finite_is_skipped_and_its_batch_kept(tmp_path, gradient_only, capsys):
    trainer_of, weights = [], Weights()
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch"}
    trainer = make_trainer(
        tmp_path,
        loss=poisoned_loss({2, 3}, trainer_of, gradient_only=gradient_only),
        callbacks=[weights],
        max_steps=5,
        learning_rate=1e-2,
        max_grad_norm=1.0,
        **options,
    )
    trainer_of.append(trainer)
    trainer.train()
    assert trainer.state.global_step == 5
    one, two, three, four, five = weights.after
    assert equal(one, two) and equal(two, three)  # neither weights nor the optimiser's state moved
    assert not equal(three, four) and not equal(four, five)
    assert all(parameter.isfinite().all() for parameter in five)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["skipped_steps"] for log in logs] == [0, 1, 1, 0, 0]
    assert [math.isfinite(log["loss"]) for log in logs] == [True, False, False, True, True]
    assert all(0 < logs[index]["student_mass"] < 1 for index in (0, 3, 4))
    out = capsys.readouterr().out
    what = "gradient" if gradient_only else "loss"
    for step in (2, 3):
        file = tmp_path / f"skipped-step-{step}-rank-0.pt"
        assert f"step {step} skipped: its {what} is not finite; its micro-batches are in {file}" in out
        batches = torch.load(file, weights_only=True)
        assert len(batches) == 2 and batches[1]["teacher"]["log_probs"].shape == (*batches[1]["target_ids"].shape, 4)
        assert batches[0]["input_ids"].shape == batches[0]["attention_mask"].shape


@pytest.mark.parametrize("formed", [False, True])
def test_a_skipped_step_keeps_a_teacher_of_the_whole_vocabulary(tmp_path, formed):
    scored = ScoredModel(make_model(seed=1).double(), PLAIN)

    def teacher(batch):
        hidden, weight, bias = scored.logits(batch)
        logits = LinearLogits(hidden * torch.nan, weight, bias)
        return logits.hidden @ logits.weight.T if formed else logits

    trainer = make_trainer(tmp_path, teacher=teacher, loss=full_vocab_loss, max_steps=1)
    trainer.train()
    (batch,) = torch.load(tmp_path / "skipped-step-1-rank-0.pt", weights_only=True)
    kept = batch["teacher"] if formed else batch["teacher"]["hidden"]
    assert len(kept) == len(batch["scored_rows"]) and kept.isnan().all()


def test_a_skipped_step_is_left_out_of_the_means_of_a_row(tmp_path):
    def logged(folder, steps):
        trainer_of = []
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.0}
        rollouts = lambda model, rows, *, seed: [[5, 6, 2] for _ in rows]  # noqa: E731
        trainer = make_trainer(
            folder, rollouts=rollouts, loss=poisoned_loss(steps, trainer_of), max_steps=3, logging_steps=3, **options
        )
        trainer_of.append(trainer)
        trainer.train()
        return next(log for log in trainer.state.log_history if "loss" in log)

    clean, poisoned = logged(tmp_path / "clean", ()), logged(tmp_path / "poisoned", {2})
    assert poisoned["skipped_steps"] == 1
    for name in ("loss", "student_mass", "teacher_mass", "mean_length"):
        assert poisoned[name] == pytest.approx(clean[name], rel=1e-5), name


def test_training_ends_when_step_after_step_is_not_finite(tmp_path):
    trainer_of = []
    loss = poisoned_loss({2, 4, 5}, trainer_of)
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 9}
    trainer_of.append(make_trainer(tmp_path, loss=loss, max_skipped_steps=2, **options))
    with pytest.raises(
        FloatingPointError, match=r"2 steps in a row, up to step 5, had a loss or gradient that is not"
    ):
        trainer_of[0].train()
    assert trainer_of[0].state.global_step == 4
    trainer_of[:] = [make_trainer(tmp_path, loss=poisoned_loss({2, 4, 5}, trainer_of), max_skipped_steps=3, **options)]
    trainer_of[0].train()
    assert trainer_of[0].state.global_step == 9


class CountReads(TorchDispatchMode):
    """Counts what would make the host wait for a device: reading a tensor's values, or a size that they decide."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        CountReads.count += any(name in str(function) for name in self.NAMES)
        return function(*args, **(kwargs or {}))


def test_the_host_waits_once_per_step_and_never_in_compute_loss(tmp_path, monkeypatch):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    trainer = make_trainer(tmp_path, model=make_model(), logging_steps=100, max_steps=3, **options)
    trainer.model.set_attn_implementation("eager")  # transformers' sdpa path reads the padding mask, once or twice
    monkeypatch.setattr(passes, "is_fake", lambda tensor: True)  # the path of devices, where reading means waiting
    reads = {"training_step": [], "_clip_grad_norm": [], "_get_grad_norm": []}
    to_list = torch.Tensor.tolist

    def counted_to_list(tensor):  # this one reaches no dispatch mode
        CountReads.count += 1
        return to_list(tensor)

    def counted(function, into):
        def call(*args, **kwargs):
            CountReads.count = 0
            with CountReads():
                result = function(*args, **kwargs)
            into.append(CountReads.count)
            return result

        return call

    monkeypatch.setattr(torch.Tensor, "tolist", counted_to_list)
    for name, counts in reads.items():
        setattr(trainer, name, counted(getattr(trainer, name), counts))
    trainer.train()
    # Forward, loss and backward; clipping; and the norm, after which all figures are read at once.
    assert reads == {"training_step": [0] * 6, "_clip_grad_norm": [0] * 3, "_get_grad_norm": [1] * 3}


def test_the_student_runs_forward_once_per_micro_batch(tmp_path):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3}
    trainer = make_trainer(tmp_path, rollouts=lambda model, rows, *, seed: [[5, 6, 2] for _ in rows], **options)
    forwards = []
    trainer.student.model.model.register_forward_hook(lambda module, args, output: forwards.append(module.training))
    trainer.train()
    assert forwards == [True] * 6


def test_evaluation_every_n_steps_reaches_metrics_callbacks_and_backends(tmp_path, monkeypatch):
    class Backend(TrainerCallback):
        rows: ClassVar[list] = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.rows.append((state.global_step, dict(logs)))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "swanlab", Backend)
    options = {"eval_strategy": "steps", "eval_steps": 2, "report_to": ["swanlab"], "max_steps": 5}
    make_trainer(tmp_path, eval_dataset=ROWS, **options).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "eval_kl" in row]
    assert [row["step"] for row in measured] == [2, 4, 5]  # and after the last step
    for row in measured:
        assert row["eval_entropy_gap"] == pytest.approx(row["eval_student_entropy"] - row["eval_teacher_entropy"])
        assert row["eval_mean_length"] == row["eval_tokens"] / 8
        assert 0 <= row["eval_truncated_share"] <= 1 and 0 <= row["eval_exact_match"] <= 1
    reported = [(step, logs) for step, logs in Backend.rows if "eval_kl" in logs or "loss" in logs]
    assert [step for step, _ in reported] == [1, 2, 2, 3, 4, 4, 5, 5]
    parts = ("rollout_seconds", "teacher_seconds", "student_seconds", "loss_seconds")
    assert all(logs[part] > 0 for _, logs in reported if "loss" in logs for part in parts)


def test_evaluate_counts_lengths_and_truncation(tmp_path, monkeypatch):
    texts = [[5, 2], [5, 6, 7, 8, 9, 4], [2], [5, 6, 7, 8, 9, 4], [6, 2], [6, 2], [6, 2], [6, 7, 8, 2]]
    monkeypatch.setattr(TransformersRollouts, "__call__", lambda self, model, rows, *, seed: texts[: len(rows)])
    metrics = make_trainer(tmp_path, eval_dataset=ROWS, per_device_eval_batch_size=8).evaluate()
    assert metrics["eval_mean_length"] == 25 / 8 and metrics["eval_truncated_share"] == 2 / 8


def test_times_elsewhere_than_on_a_cpu_come_from_events(monkeypatch):
    class Event:
        now = 0.0

        def __init__(self, device, enable_timing):
            assert device.type == "cuda" and enable_timing

        def record(self):
            Event.now += 250.0
            self.at = Event.now

        def elapsed_time(self, end):
            return end.at - self.at

    waits = []
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    meter = StepMeter(torch.device("cuda", 0))
    meter.begin_step()
    with meter.timed("rollout"):
        pass
    with meter.timed("loss"):
        pass
    assert waits == []
    means = meter.means()
    assert waits == [torch.device("cuda", 0)]
    seconds = {part: means[f"{part}_seconds"] for part in ("rollout", "teacher", "student", "loss")}
    assert seconds == {"rollout": 0.25, "teacher": 0.0, "student": 0.75, "loss": 0.25}

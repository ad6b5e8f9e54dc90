"""Teachers other than one model: several, one that reads more, the student's moving average, sampled targets."""

import json
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
import yaml
from transformers import TrainerCallback

from potstill import LogitTransform, SampledTargets, TeacherTopK, topk_distillation_loss
from potstill.teachers.local import LocalTeacher, MovingAverage
from potstill.teachers.routing import RoutedTeacher
from potstill.train import RecipeError, load_recipe, run
from potstill.train.batch import as_teacher_reads, batch_for
from potstill.train.load import build_trainer, training_arguments
from test_trainer import TOKENIZER, make_trainer
from train_fixtures import WORDS, make_model, make_tokenizer, write_recipe

PLAIN = LogitTransform()
COMPLETIONS = [[7, 8, 2], [9], [], [4, 5, 6, 2]]
ROWS = [
    {"prompt_ids": [1, 4 + i, *[5] * i], "answer": None, "completion_ids": None, "teacher_id": name}
    for i, name in enumerate(["math", "code", "code", "math"])
]


def local(seed, **options):
    return LocalTeacher(make_model(seed=seed).double(), PLAIN, top_k=4, **options)


def test_each_row_is_scored_by_its_own_teacher():
    math, code = local(1), local(2)
    batch = batch_for(make_model(), TOKENIZER, ROWS, COMPLETIONS)
    routed = RoutedTeacher({"math": math, "code": code, "idle": local(3)})(batch)
    own = {0: math, 1: code, 3: math}
    alone = [teacher(batch_for(make_model(), TOKENIZER, [ROWS[i]], [COMPLETIONS[i]])) for i, teacher in own.items()]
    assert torch.equal(routed.token_ids, torch.cat([rows.token_ids for rows in alone]))
    for name in ("log_probs", "rest_log_prob"):
        torch.testing.assert_close(getattr(routed, name), torch.cat([getattr(rows, name) for rows in alone]))


def test_teachers_that_answer_later_are_waited_for():
    batch = batch_for(make_model(), TOKENIZER, ROWS, COMPLETIONS)
    with ThreadPoolExecutor(1) as later:
        routed = RoutedTeacher({"math": local(1), "code": lambda part: later.submit(local(2), part)})(batch)
        assert isinstance(routed, Future)
        rows = routed.result()
    expected = RoutedTeacher({"math": local(1), "code": local(2)})(batch)
    assert torch.equal(rows.token_ids, expected.token_ids)


def test_a_rest_that_one_teacher_does_not_give_is_filled_in():
    def server(part):
        rows = local(2)(part)
        return TeacherTopK(rows.token_ids, rows.log_probs)

    batch = batch_for(make_model(), TOKENIZER, ROWS, COMPLETIONS)
    rows = RoutedTeacher({"math": local(1), "code": server})(batch)
    mass = rows.log_probs.exp().sum(1) + rows.rest_log_prob.exp()
    torch.testing.assert_close(mass, torch.ones_like(mass))


def test_an_unknown_teacher_is_named():
    batch = batch_for(make_model(), TOKENIZER, ROWS, COMPLETIONS)
    with pytest.raises(KeyError, match="no teacher is called 'code'; there are math"):
        RoutedTeacher({"math": local(1)})(batch)


def test_weights_and_metrics_of_several_teachers(tmp_path):
    rows = [{**row, "completion_ids": own or [3]} for row, own in zip(ROWS, COMPLETIONS, strict=True)]
    weighted = [{**row, "weight": 0.25} if row["teacher_id"] == "code" else row for row in rows]
    teachers = {"math": local(1), "code": local(2)}
    options = {"lmbda": 0.0, "train_dataset": weighted, "per_device_train_batch_size": 4, "max_steps": 1}
    trainer = make_trainer(tmp_path, teacher=RoutedTeacher(teachers), **options)
    batch = batch_for(make_model(), TOKENIZER, rows, [row["completion_ids"] for row in rows])
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = make_model().double()(**inputs).logits[batch["score_mask"]]
    per_token = topk_distillation_loss(logits, RoutedTeacher(teachers)(batch)).per_token
    weights = torch.tensor([1.0] * 3 + [0.25] * 2 + [1.0] * 4)
    trainer.train()
    log = next(row for row in trainer.state.log_history if "loss" in row)
    assert log["loss"] == pytest.approx((weights * per_token).sum().item() / 9)
    assert (log["tokens/math"], log["tokens/code"]) == (7, 2)
    assert log["loss/math"] == pytest.approx(per_token[weights == 1].mean().item())
    assert log["loss/code"] == pytest.approx(per_token[weights < 1].mean().item())


def test_a_teacher_reads_its_own_prompt():
    rows = [{**ROWS[0], "teacher_prompt_ids": [1, 6, 6, 6, 6]}, ROWS[1]]
    batch = batch_for(make_model(), TOKENIZER, rows, COMPLETIONS[:2])
    seen = as_teacher_reads(batch)
    assert seen["input_ids"].tolist() == [[1, 6, 6, 6, 6, 7, 8, 2], [1, 5, 5, 9, 0, 0, 0, 0]]
    assert torch.equal(seen["target_ids"], batch["target_ids"])
    told = batch_for(make_model(), TOKENIZER, [{**ROWS[0], "prompt_ids": [1, 6, 6, 6, 6]}, ROWS[1]], COMPLETIONS[:2])
    torch.testing.assert_close(local(1)(seen).log_probs, local(1)(told).log_probs)
    assert as_teacher_reads(told) is told


def test_the_trainer_shows_a_teacher_its_own_prompt(tmp_path):
    rows = [{**row, "completion_ids": [7, 2], "teacher_prompt_ids": [1, 8, 8]} for row in ROWS]
    seen = []

    def teacher(batch):
        seen.append(batch["input_ids"])
        return local(1)(batch)

    options = {"lmbda": 0.0, "train_dataset": rows, "per_device_train_batch_size": 4, "max_steps": 1}
    make_trainer(tmp_path, teacher=teacher, **options).train()
    assert seen[0].tolist() == [[1, 8, 8, 7, 2]] * 4


def test_a_moving_average_follows_by_its_rate(tmp_path):
    class Record(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            students.append([parameter.detach().clone() for parameter in model.parameters()])

    student = make_model().double()
    students = [[parameter.detach().clone() for parameter in student.parameters()]]
    average = MovingAverage(student, PLAIN, top_k=4, rate=0.75)
    assert not any(parameter.requires_grad for parameter in average.model.parameters())
    make_trainer(tmp_path, model=student, teacher=average, max_steps=2, callbacks=[Record()]).train()
    for parameter, first, second, third in zip(average.model.parameters(), *students, strict=True):
        torch.testing.assert_close(parameter, 0.75 * (0.75 * first + 0.25 * second) + 0.25 * third)
    assert not torch.equal(students[0][0], students[1][0])


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_rates_out_of_range(rate):
    with pytest.raises(ValueError, match=f"rate is {rate}; expected 0 to below 1"):
        MovingAverage(make_model(), PLAIN, top_k=4, rate=rate)


def test_an_average_resumes_to_the_bit(tmp_path):
    def averaged(folder, **options):
        student = make_model().double()
        teacher = MovingAverage(student, PLAIN, top_k=4, rate=0.9)
        return make_trainer(folder, model=student, teacher=teacher, max_steps=4, **options)

    whole = averaged(tmp_path / "whole")
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 2}
    averaged(tmp_path / "parts", **saving).train()
    resumed = averaged(tmp_path / "parts", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    for ours, theirs in ((whole.model, resumed.model), (whole.teacher.model, resumed.teacher.model)):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_sampled_targets_of_a_local_teacher():
    batch = batch_for(make_model(), TOKENIZER, ROWS, COMPLETIONS)
    teacher = local(1, targets="threshold")
    torch.manual_seed(5)
    rows = teacher(batch)
    torch.manual_seed(5)
    expected = SampledTargets.from_logits(teacher.logits(batch), 4, method="threshold")
    assert torch.equal(rows.token_ids, expected.token_ids) and torch.equal(rows.weights, expected.weights)


# The same from a recipe.


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path)


def changed(path, **sections):
    source = yaml.safe_load(path.read_text())
    for name, section in sections.items():
        if section is None:
            del source[name]
        else:
            source[name] = section
    path.write_text(yaml.safe_dump(source))
    return path


def with_columns(path, **columns):
    """Give the rows of the recipe's data further columns: functions of their number."""
    for split in ("train", "heldout"):
        file = path.parent / f"{split}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [{**row, **{name: of(i) for name, of in columns.items()}} for i, row in enumerate(rows)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def teachers_by_parity(path):
    make_model(seed=5, layers=4).save_pretrained(path.parent / "other")
    TOKENIZER.save_pretrained(path.parent / "other")
    teachers = {"even": {"model": str(path.parent / "teacher")}, "odd": {"model": str(path.parent / "other")}}
    teachers["odd"]["weight"] = 0.5
    changed(path, teacher=None, teachers=teachers)
    return with_columns(path, teacher_id=lambda i: ("even", "odd")[i % 2])


def test_a_recipe_with_several_teachers(recipe_file, capsys):
    result = run(load_recipe(teachers_by_parity(recipe_file)))
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    logged = next(row for row in rows if "tokens/odd" in row)
    assert logged["tokens/even"] > 0 and logged["tokens/odd"] > 0
    assert result.after["eval_kl"] > 0
    out = capsys.readouterr()
    assert "teacher even: " in out.out + out.err and "teacher odd: " in out.out + out.err
    card = (result.folder / "README.md").read_text()
    assert "teacher` and `" in card


def test_rows_are_held_out_from_their_own_teacher(recipe_file):
    recipe = load_recipe(teachers_by_parity(recipe_file), ["rollout.temperature=1.0"])
    trainer = build_trainer(recipe, training_arguments(recipe))
    both = trainer.evaluate()
    rows = list(trainer.eval_dataset)
    parts = [trainer.evaluate([row for row in rows if row["teacher_id"] == name]) for name in ("even", "odd")]
    tokens = sum(part["eval_tokens"] for part in parts)
    kl = sum(part["eval_kl"] * part["eval_tokens"] for part in parts) / tokens
    assert both["eval_tokens"] == tokens
    assert both["eval_kl"] == pytest.approx(kl, rel=1e-6)


@pytest.mark.parametrize("name", ["third", None])
def test_an_id_without_a_teacher_fails_before_the_run(recipe_file, name, monkeypatch):
    teachers_by_parity(recipe_file)
    with_columns(recipe_file, teacher_id=lambda i: name if i == 3 else "even")
    monkeypatch.setattr("potstill.train.load.load_model", lambda *x: pytest.fail("a model was loaded"))
    with pytest.raises(
        RecipeError, match=f"data.train: row 4: teacher_id is {name!r}; expected one of teachers: even, odd"
    ):
        run(load_recipe(recipe_file))


def test_teachers_of_different_tokenizers(recipe_file):
    teachers_by_parity(recipe_file)
    words = [*WORDS[:-2], WORDS[-1], WORDS[-2]]
    make_tokenizer(words).save_pretrained(recipe_file.parent / "other")
    with pytest.raises(RecipeError, match=r"teachers.odd.model=.*the tokenizers differ"):
        run(load_recipe(recipe_file))


def test_a_recipe_whose_teacher_knows_the_answer(recipe_file):
    with_columns(recipe_file, hint=lambda i: f"h {i % 10}" if i % 2 else [{"role": "user", "content": "a b"}])
    TOKENIZER.chat_template = None
    recipe = load_recipe(recipe_file, ["teacher.prompt_column=hint"])
    with pytest.raises(RecipeError, match=r"data\.train: row 1: the tokenizer refuses .*no chat template"):
        build_trainer(recipe, training_arguments(recipe))
    with_columns(recipe_file, hint=lambda i: f"h {i % 10}")
    trainer = build_trainer(recipe, training_arguments(recipe))
    assert trainer.train_dataset[3]["teacher_prompt_ids"] == TOKENIZER("h 3").input_ids
    with pytest.raises(RecipeError, match=r"data\.train: row 1: no column 'clue', which teacher.prompt_column names"):
        run(load_recipe(recipe_file, ["teacher.prompt_column=clue"]))
    assert run(recipe).after["eval_kl"] > 0


def test_a_recipe_with_an_average(recipe_file):
    changed(recipe_file, student={"model": str(recipe_file.parent / "teacher")}, teacher={"ema": 0.9})
    with_columns(recipe_file, hint=lambda i: f"h {i % 10}")
    recipe = load_recipe(recipe_file, ["teacher.prompt_column=hint"])
    trainer = build_trainer(recipe, training_arguments(recipe))
    assert isinstance(trainer.teacher, MovingAverage) and trainer.teacher.rate == 0.9
    assert run(recipe).after["eval_kl"] > 0


def test_a_recipe_with_sampled_targets(recipe_file):
    recipe = load_recipe(recipe_file, ["loss.targets=threshold"])
    trainer = build_trainer(recipe, training_arguments(recipe))
    rows = trainer.teacher(batch_for(trainer.model, trainer.tokenizer, trainer.train_dataset[:2], [[7, 2], [8]]))
    assert isinstance(rows, SampledTargets)
    assert run(recipe).after["eval_kl"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.targets=threshold", "loss.divergence=jsd"], "'jsd', which only goes with targets: top_k"),
        (["loss.targets=threshold", "loss.loss_min_clamp=0.0"], "loss.loss_min_clamp is 0.0, which only goes with"),
        (["loss.targets=best"], "loss.targets is 'best'; expected one of top_k, threshold, random"),
        (["teacher.ema=1.5"], "teacher.ema is 1.5; expected 0 to below 1"),
        (["teacher.ema=0.9", "teacher.cache=x"], "teacher.cache and teacher.ema exclude each other"),
        (["teacher.weight=0"], "teacher.weight is 0; expected a number above 0"),
        (["teachers={a: {model: x}}"], "teacher and teachers are one or several of the same; leave one out"),
        (["teacher=null", "teachers={a: {model: x, cache: y}}"], "teachers.a.cache: only a single `teacher` can"),
        (["teacher=null", "teachers={a: {modle: x}}"], "unknown key teachers.a.modle; did you mean teachers.a.model"),
        (["teacher=null", "teachers={a: 3}"], "teachers.a is 3; expected a mapping"),
        (["data.train=null"], "data.train is missing"),
    ],
)  # fmt: skip
def test_recipes_that_are_refused(recipe_file, overrides, message):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file, overrides)
    assert message in str(error.value)

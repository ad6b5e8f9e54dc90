"""A `distillation_loss` block of verl in a recipe: every mode, every default, every pair that is refused."""

import shutil

import pytest
import torch
import yaml

from potstill import LinearLogits, TeacherTopK
from potstill.train import RecipeError, load_recipe
from potstill.train.losses import loss_function
from potstill.train.recipe import Loss
from potstill.train.verl_names import DistillationLoss, loss_section
from train_fixtures import write_recipe

# As verl 0.9.1 ships it, with the one key that must change.
SHIPPED = """
  _target_: verl.workers.config.DistillationLossConfig
  loss_mode: k3
  topk: 32
  use_task_rewards: false
  distillation_loss_coef: 1.0
  loss_max_clamp: null
  log_prob_min_clamp: null
  use_policy_gradient: false
  policy_loss_mode: "vanilla"
  clip_ratio: 0.2
  clip_ratio_low: 0.2
  clip_ratio_high: 0.2
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("template"))


@pytest.fixture
def recipe_file(template, tmp_path):
    shutil.copytree(template.parent, tmp_path, ignore=shutil.ignore_patterns("teacher"), dirs_exist_ok=True)
    path = tmp_path / template.name
    source = yaml.safe_load(path.read_text())
    del source["loss"]
    path.write_text(yaml.safe_dump(source) + "distillation_loss:" + SHIPPED)
    return path


def load(path, *overrides):
    return load_recipe(path, [f"distillation_loss.{override}" for override in overrides])


def test_what_a_block_leaves_out_has_the_value_of_verls_yaml(recipe_file):
    assert loss_section(yaml.safe_load(SHIPPED)) == loss_section({}) == loss_section({"loss_mode": None})
    assert load(recipe_file).loss == Loss(estimator="k3", loss_max_clamp=10.0)
    assert load(recipe_file).notes == []
    defaults = DistillationLoss()
    for key, value in yaml.safe_load(SHIPPED).items():
        assert key == "_target_" or getattr(defaults, key) == value, key


@pytest.mark.parametrize(
    "overrides, loss",
    [
        (["loss_mode=forward_kl_topk"], Loss(tail="drop", top_k=32, loss_min_clamp=0.0)),
        (
            ["loss_mode=forward_kl_topk", "topk=8", "log_prob_min_clamp=-10", "loss_max_clamp=5"],
            Loss(tail="drop", top_k=8, loss_min_clamp=0.0, log_prob_min_clamp=-10, loss_max_clamp=5),
        ),
        (["loss_mode=forward_kl_topk_tail", "loss_max_clamp=5.0"], Loss(top_k=32, loss_max_clamp=5.0)),
        (["loss_mode=k2"], Loss(estimator="k2")),
        (["loss_mode=mse", "loss_max_clamp=4.0"], Loss(estimator="k2", loss_max_clamp=4.0)),
        (["loss_mode=abs"], Loss(estimator="abs")),
        (["loss_mode=low_var_kl", "loss_max_clamp=4.0"], Loss(estimator="k3", loss_max_clamp=4.0)),
        (["loss_mode=k3", "loss_max_clamp=40.0"], Loss(estimator="k3", loss_max_clamp=10.0)),
        (["loss_mode=k1", "use_policy_gradient=true"], Loss(estimator="k1", policy_gradient=True)),
        (
            ["loss_mode=kl", "use_policy_gradient=true", "clip_ratio_high=0.28", "clip_ratio=0.9"],
            Loss(estimator="k1", policy_gradient=True, clip_ratio_high=0.28),
        ),
        (  # verl reads clip_ratio where the other two are null
            ["loss_mode=k1", "use_policy_gradient=true", "clip_ratio_low=", "clip_ratio=0.9"],
            Loss(estimator="k1", policy_gradient=True, clip_ratio_low=0.9),
        ),
        (["loss_mode=k2", "clip_ratio_high=0.28"], Loss(estimator="k2")),
        (
            ["loss_mode=forward_kl_topk", "use_chunked_topk=true", "chunked_topk_chunk_size=512"],
            Loss(tail="drop", top_k=32, loss_min_clamp=0.0, chunk_size=512),
        ),
    ],
)
def test_every_mode(recipe_file, overrides, loss):
    recipe = load(recipe_file, *overrides)
    assert recipe.loss == loss
    assert recipe.notes == []


@pytest.mark.parametrize(
    "overrides, note",
    [
        (["use_chunked_topk=false", "chunked_topk_chunk_size=512"], "use_chunked_topk: false has no effect"),
        (["loss_mode=forward_kl_topk_tail", "tail_mass_eps=1e-6"], "tail_mass_eps has no effect"),
        (["distillation_loss_coef=0.5"], "distillation_loss_coef has no effect without task rewards"),
        (["log_prob_min_clamp=-10.0"], "log_prob_min_clamp has no effect on loss_mode k3"),
    ],
)
def test_what_has_no_effect_is_said_once(recipe_file, overrides, note):
    recipe = load(recipe_file, *overrides)
    (said,) = recipe.notes
    assert said.startswith(note)
    assert recipe.loss.chunk_size is None


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["loss_mod=k1"], r"unknown key distillation_loss.loss_mod; did you mean distillation_loss.loss_mode\?"),
        (["loss_mode=forward_kl_top_k"], r"distillation_loss.loss_mode is .*; did you mean forward_kl_topk\?"),
        (["loss_mode=full"], "known: forward_kl_topk, forward_kl_topk_tail, k1, kl, k2, mse, k3, low_var_kl, abs"),
        (["topk=many"], "distillation_loss.topk is 'many'; expected int"),
        (["loss_mode=forward_kl_topk", "topk=0"], "loss.top_k is 0; expected 1 or more"),
        (["use_task_rewards=true"], "distillation_loss.use_task_rewards is true, but there is no reward loop here"),
        (["policy_loss_mode=gspo"], "distillation_loss.policy_loss_mode is 'gspo'; expected one of vanilla"),
        (["tail_mass_eps=0.0"], "distillation_loss.tail_mass_eps is 0; expected a number between 0 and 1"),
        (["tail_mass_eps=1"], "distillation_loss.tail_mass_eps is 1; expected a number between 0 and 1"),
        (["loss_mode=forward_kl_topk_tail", "log_prob_min_clamp=-10"], "log_prob_min_clamp .* forward_kl_topk_tail"),
        (["loss_mode=k1"], "loss_mode k1 with use_policy_gradient: false has no learning signal"),
        (["loss_mode=kl"], "loss_mode kl with use_policy_gradient: false has no learning signal"),
        (["loss_mode=forward_kl_topk", "use_policy_gradient=true"], "forward_kl_topk with use_policy_gradient: true"),
        (["loss_mode=forward_kl_topk_tail", "use_policy_gradient=true"], "forward_kl_topk_tail with use_policy_grad"),
        (["loss_mode=k2", "loss_max_clamp=0"], "loss: loss_max_clamp must be > 0, got 0"),
        (["loss_mode=k3", "loss_max_clamp=-1.0"], "loss: loss_max_clamp must be > 0"),
        (["loss_mode=k1", "use_policy_gradient=true", "clip_ratio_low=1.5"], "loss: clip_ratio_low must be in"),
    ],
)
def test_what_is_refused(recipe_file, overrides, message):
    with pytest.raises(RecipeError, match=rf"tiny\.yaml: .*{message}"):
        load(recipe_file, *overrides)


def test_two_names_of_one_section(recipe_file):
    with pytest.raises(RecipeError, match="loss and distillation_loss are one section under two names"):
        load_recipe(recipe_file, ["loss.top_k=4"])
    with pytest.raises(RecipeError, match="distillation_loss is 3; expected a mapping"):
        load_recipe(recipe_file, ["distillation_loss=3"])


# -- the numbers, against verl's own formulas ---------------------------------------------------------------------

N, V, H = 6, 11, 4


@pytest.fixture
def rows():
    hidden = torch.randn(N, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, dtype=torch.float64) * 2
    return hidden, weight, torch.randn(N, V, dtype=torch.float64) * 4, torch.randint(V, (N,))


VERL_ESTIMATORS = {
    "k1": lambda log_r: -log_r,
    "k2": lambda log_r: log_r**2 / 2,
    "k3": lambda log_r: (log_r.exp() - log_r - 1).clamp(-10, 10),
    "abs": lambda log_r: log_r.abs(),
}


@pytest.mark.parametrize(
    "mode, reward", [*((mode, True) for mode in VERL_ESTIMATORS), ("k2", False), ("k3", False), ("abs", False)]
)
@pytest.mark.parametrize("clamp", [None, 1.5])
def test_estimators_have_verls_values_and_gradients(rows, mode, reward, clamp):
    hidden, weight, teacher_logits, sampled = rows
    block = {"loss_mode": mode, "use_policy_gradient": reward, "loss_max_clamp": clamp}
    loss = loss_function(Loss(**loss_section(block)[0]))
    teacher = TeacherTopK.from_logits(teacher_logits, token_ids=sampled.unsqueeze(1))
    batch = {"teacher": teacher, "target_ids": sampled}
    output = loss(LinearLogits(hidden, weight), batch, num_tokens=9, transform=None)
    (got,) = torch.autograd.grad(output.loss, hidden)

    index = torch.arange(N)
    log_q = (hidden @ weight.T).log_softmax(-1)[index, sampled]
    log_p = teacher_logits.log_softmax(-1)[index, sampled]
    value = VERL_ESTIMATORS[mode](log_p - log_q)
    assert (value.detach().abs() > 1.5).any() and (value.detach().abs() < 1.5).any()  # both sides of the clamp
    if clamp is not None:
        value = value.clamp(-clamp, clamp)
    if reward:  # on-policy: the ratio to the policy that sampled is 1
        value = value.detach() * (log_q - log_q.detach()).exp()
    expected = value.sum() / 9
    (gradient,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(got, gradient, rtol=1e-10, atol=1e-13)


def test_forward_kl_topk_has_verls_floor_and_clamps(rows):
    hidden, weight, teacher_logits, _ = rows
    block = {"loss_mode": "forward_kl_topk", "topk": 2, "log_prob_min_clamp": -2.0, "loss_max_clamp": 1.0}
    teacher = TeacherTopK.from_logits(teacher_logits, 2)
    output = loss_function(Loss(**loss_section(block)[0]))(
        LinearLogits(hidden, weight), {"teacher": teacher}, num_tokens=None, transform=None
    )
    log_q = (hidden @ weight.T).log_softmax(-1).gather(1, teacher.token_ids).clamp(min=-2.0)
    log_p = teacher.log_probs.clamp(min=-2.0)
    value = (log_p.exp() * (log_p - log_q)).sum(1)
    assert (value < 0).any()
    expected = value.clamp(min=0.0).clamp(-1.0, 1.0).mean()
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-14)


def test_a_payload_of_another_temperature_is_refused(rows):
    hidden, weight, teacher_logits, _ = rows
    loss = loss_function(Loss(temperature=2.0))
    teacher = TeacherTopK.from_logits(teacher_logits, 4, temperature=2.0)
    assert loss(LinearLogits(hidden, weight), {"teacher": teacher}).loss > 0
    with pytest.raises(ValueError, match=r"rows were taken at temperature 1\.0 but the loss asks for 2\.0"):
        loss(LinearLogits(hidden, weight), {"teacher": TeacherTopK.from_logits(teacher_logits, 4)})


def test_no_scored_token_is_a_loss_of_zero_with_a_graph(rows):
    hidden, weight, _, _ = rows
    loss = loss_function(Loss(estimator="k3", loss_max_clamp=10.0))
    teacher = TeacherTopK(torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1))
    batch = {"teacher": teacher, "target_ids": torch.zeros(0, dtype=torch.int64)}
    output = loss(LinearLogits(hidden[:0], weight), batch, num_tokens=torch.tensor(0), transform=None)
    output.loss.backward()
    assert output.loss == 0 and not hidden.grad.any()

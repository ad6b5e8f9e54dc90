"""integrations/verl.py inside verl's own loss function: its configuration, batches, engines' layouts and metrics."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hydra
import pytest
import torch
import torch.distributed as dist
import verl
from megatron.core import parallel_state
from tensordict import TensorDict
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.trainer.distillation import distillation_ppo_loss, losses
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import Metric
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.ulysses import set_ulysses_sequence_parallel_group, slice_input_tensor
from verl.workers.config import ActorConfig, DistillationConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import potstill.integrations.verl as integration
from potstill import TeacherTopK, topk_distillation_loss

V, K = 32, 5
PROMPTS, RESPONSES = (2, 3, 1), (4, 2, 5)  # tokens of each sequence
DROP = "potstill_forward_kl_drop"


def nested(parts):
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def micro_batch(k=K):
    """What a worker gets: nested tensors, the teacher's as its server's client makes them."""
    torch.manual_seed(7)
    ids, log_probs = [], []
    for length in (p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)):
        rows = TeacherTopK.from_logits(2 * torch.randn(length, V), k)
        rows.token_ids[-1], rows.log_probs[-1] = 0, 0.0  # its filler for the last token
        ids.append(rows.token_ids.int())
        log_probs.append(rows.log_probs)
    masks = [torch.ones(r, dtype=torch.int64) for r in RESPONSES]
    masks[2][1:3] = 0  # a tool's answer
    batch = TensorDict(
        {
            "prompts": nested(torch.zeros(p, dtype=torch.int64) for p in PROMPTS),
            "responses": nested(torch.zeros(r, dtype=torch.int64) for r in RESPONSES),
            "response_mask": nested(masks),
            "teacher_ids": nested(ids),
            "teacher_logprobs": nested(log_probs),
        },
        batch_size=3,
    )
    assign_non_tensor(batch, dp_size=2, batch_num_tokens=20, global_batch_size=6)
    return batch


def logits_of_the_batch():
    """Every third row puts more on the teacher's ids than the teacher does: there the loss of `drop` is negative."""
    torch.manual_seed(8)
    logits = torch.randn(sum(PROMPTS + RESPONSES), V)
    logits[::3] = logits[::3].scatter_add(
        1, micro_batch()["teacher_ids"].values()[::3].long(), torch.full((6, K), 4.0)
    )
    return logits


def settings(loss_mode, strategy="fsdp", config_class="verl.workers.config.DistillationLossConfig", **loss):
    """The two configurations, through Hydra as a run makes them. Unlike verl's class, its YAML clamps nothing."""
    loss = {"use_policy_gradient": False, "use_task_rewards": False, "topk": K, **loss}
    loss = {"loss_max_clamp": None, "log_prob_min_clamp": None, "loss_mode": loss_mode, **loss}
    block = {
        "_target_": "verl.workers.config.DistillationConfig",
        "distillation_loss": {"_target_": config_class, **loss},
    }
    distillation = omega_conf_to_dataclass(block)
    assert isinstance(distillation, DistillationConfig)
    return ActorConfig(strategy=strategy, rollout_n=1, use_dynamic_bsz=True), distillation


def run(loss_mode, student_logits, data_format="thd", unpack=lambda x: x.squeeze(0), **options):
    """verl's two calls around its engine, and backward: rows, loss, metrics and the gradient of the logits."""
    configs, batch = settings(loss_mode, **options), micro_batch()
    student_logits = student_logits.detach().clone().requires_grad_()
    rows = distillation_ppo_loss(*configs, data=batch, student_logits=student_logits, data_format=data_format)
    offsets = batch["teacher_ids"].offsets()
    model_output = {n: torch.nested.nested_tensor_from_jagged(unpack(x), offsets) for n, x in rows.items()}
    loss, metrics = distillation_ppo_loss(*configs, model_output=model_output, data=batch)
    metrics = {name: torch.tensor(x.aggregate() if isinstance(x, Metric) else x) for name, x in metrics.items()}
    return rows, loss, metrics, torch.autograd.grad(loss, student_logits)[0]


def compare(same, student_logits, scored, **options):
    """`drop` is verl's mode: every row that predicts a token, the loss, all metrics, the gradient."""
    ours = run(DROP, student_logits, config_class="potstill.integrations.verl.LossConfig", diagnostics=True, **options)
    theirs = run("forward_kl_topk", student_logits, **options)
    assert (ours[0]["distillation_losses"][~scored] == 0).all()
    assert (theirs[0]["distillation_losses"][scored] < 0).any()
    floor = options.get("log_prob_min_clamp")
    megatron_masses = floor is not None and options.get("strategy") == "megatron"  # taken of the clamped ones there
    assert ours[0].keys() == theirs[0].keys()
    for name, rows in theirs[0].items():
        expected = rows.clamp(min=0.0) if name == "distillation_losses" else rows  # clamped later there
        if not ("mass" in name and megatron_masses):
            same(ours[0][name][scored], expected[scored])
    same(ours[1], theirs[1])
    assert ours[2].keys() == theirs[2].keys()
    for name, value in theirs[2].items():
        if not ("mass" in name and megatron_masses):
            same(ours[2][name], value)
    assert (theirs[3] != 0).any()
    same(ours[3], theirs[3])


def predicting(batch):
    """[1, total]: every row but the last of each sequence."""
    scored = torch.ones(1, len(batch["teacher_ids"].values()), dtype=torch.bool)
    scored[0, batch["teacher_ids"].offsets()[1:] - 1] = False
    return scored


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("options", [{}, {"log_prob_min_clamp": -4.0}, {"loss_max_clamp": 3.0}])
def test_drop_is_verls_on_fsdp(same, chunked, options):
    options |= {"use_chunked_topk": chunked, "chunked_topk_chunk_size": 7}
    compare(same, logits_of_the_batch().unsqueeze(0), predicting(micro_batch()), **options)


@pytest.mark.parametrize("packed", [True, False])
def test_through_the_engine(same, monkeypatch, packed):
    """A step of verl's FSDP engine, with and without log-probabilities beside: `drop` is its own mode there too."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.embedding, self.head = torch.nn.Embedding(V, 8), torch.nn.Linear(8, V)

        def forward(self, input_ids, **others):
            return SimpleNamespace(logits=4 * self.head(self.embedding(input_ids)))

    def step(loss_mode, distillation_only):
        engine = object.__new__(FSDPEngineWithLMHead)
        engine.module, engine._autocast_dtype, engine.pad_to_length = Model(), torch.float32, False
        engine.use_ulysses_sp = False
        engine.get_data_parallel_group = lambda: None
        batch = micro_batch()
        offsets = batch["teacher_ids"].offsets()
        tokens = torch.arange(int(offsets[-1])) * 5 % V
        batch["input_ids"] = torch.nested.nested_tensor_from_jagged(tokens, offsets)
        batch["position_ids"] = torch.nested.nested_tensor_from_jagged(torch.zeros_like(tokens), offsets)
        flags = {"use_remove_padding": packed, "distillation_only": distillation_only, "distillation_use_topk": True}
        assign_non_tensor(batch, temperature=0.7, **flags)
        actor, distillation = settings(loss_mode)
        function = partial(distillation_ppo_loss, config=actor, distillation_config=distillation)
        kept = []
        found = engine.forward_step(batch, lambda **given: kept.append(function(**given)) or kept[-1], False)
        kept[-1][0].backward()
        return found[1], [x.grad for x in engine.module.parameters()]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # where verl takes the batch
    for distillation_only in (True, False):
        (ours, gradients), (theirs, wanted) = (step(mode, distillation_only) for mode in (DROP, "forward_kl_topk"))
        assert abs(ours["loss"] / theirs["loss"] - 1) < 1e-6
        for found, expected in zip(gradients, wanted, strict=True):
            same(found, expected)


def test_ulysses(on_ranks, same):
    """Each rank holds half of the packed rows; the last rank's end in padding."""

    def check():
        group = dist.group.WORLD
        set_ulysses_sequence_parallel_group(group)

        def unpack(x):
            parts = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(parts, x.detach().contiguous(), group)
            parts[dist.get_rank()] = x
            return torch.cat(parts, 1)[0, : len(logits_of_the_batch())]

        own = slice_input_tensor(logits_of_the_batch().unsqueeze(0), dim=1)
        scored = slice_input_tensor(predicting(micro_batch()), dim=1)
        compare(same, own, scored, unpack=unpack)

    on_ranks(check, tensor_model_parallel_size=1)


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.parametrize("floor", [None, -4.0])
def test_drop_is_verls_on_megatron(on_ranks, same, data_format, tp, floor):
    """Two ranks: tensor parallel, or context parallel (tp = 1)."""

    def check():
        batch = micro_batch()
        offsets = batch["teacher_ids"].offsets()
        split = preprocess_thd_engine if data_format == "thd" else preprocess_bshd_engine
        whole = torch.nested.nested_tensor_from_jagged(logits_of_the_batch(), offsets)
        at = torch.nested.nested_tensor_from_jagged(torch.arange(1, 1 + len(whole.values())), offsets)
        own, places = split(whole)[0], split(at)[0]
        own = own.chunk(tp, -1)[parallel_state.get_tensor_model_parallel_rank()]

        def unpack(x):
            """Rows of the packed batch; those of other context-parallel ranks without gradient."""
            parts = [(places, x)]
            if tp == 1:
                shapes = [torch.empty_like(places) for _ in range(2)], [torch.empty_like(x) for _ in range(2)]
                dist.all_gather(shapes[0], places)
                dist.all_gather(shapes[1], x.detach().contiguous())
                parts = list(zip(*shapes, strict=True))
                parts[dist.get_rank()] = (places, x)
            found = x.new_zeros(1 + len(whole.values()))
            for place, rows in parts:
                found = found.index_put((place.flatten(),), rows.flatten())
            return found[1:]

        last = (places.unsqueeze(-1) == offsets[1:]).any(-1)
        options = {"strategy": "megatron", "data_format": data_format, "log_prob_min_clamp": floor}
        compare(same, own, (places > 0) & ~last, unpack=unpack, **options)

    layout = {"tensor_model_parallel_size": tp, "context_parallel_size": 2 // tp}
    on_ranks(check, **layout)


@pytest.mark.parametrize("mode", integration.MODES)
def test_every_mode_is_the_public_loss(same, mode):
    divergence, tail = integration.MODES[mode]
    student_logits = logits_of_the_batch().unsqueeze(0)
    rows, loss, metrics, gradient = run(mode, student_logits)
    batch = micro_batch()
    teacher = TeacherTopK(batch["teacher_ids"].values().unsqueeze(0), batch["teacher_logprobs"].values().unsqueeze(0))
    # Predictions of responses stand one row before their tokens.
    mask = []
    for own, length in zip(batch["response_mask"].unbind(), batch["teacher_ids"].offsets().diff(), strict=True):
        mask += [0] * (int(length) - len(own) - 1) + own.tolist() + [0]
    leaf = student_logits.requires_grad_()
    floor = {"loss_min_clamp": 0.0} if mode == DROP else {}
    out = topk_distillation_loss(
        leaf, teacher, divergence=divergence, tail=tail, mask=torch.tensor([mask]), num_tokens=20 / 2, **floor
    )
    same(loss, out.loss)
    same(gradient, torch.autograd.grad(out.loss, leaf)[0])
    same(metrics["distillation/student_mass_min"], out.metrics["student_mass_min"])
    same(metrics["distillation/loss_max"], out.metrics["loss_max"])
    assert "overlap_count" not in rows


class InPlace(torch.autograd.Function):
    """The first column of each row; its backward writes to the logits without telling, as Flash Attention's does."""

    @staticmethod
    def forward(ctx, logits):
        ctx.logits = logits
        return logits[..., 0].clone()

    @staticmethod
    def backward(ctx, upstream):
        ctx.logits.data.zero_()[..., 0] = upstream
        return ctx.logits.data


def test_with_task_rewards_the_logits_are_not_ours_alone(same):
    actor, distillation = settings("potstill_forward_kl_bucket")
    leaf = logits_of_the_batch().unsqueeze(0).requires_grad_()

    def gradient(policy_loss, **flags):
        batch, student_logits = micro_batch(), leaf * 1.0
        assign_non_tensor(batch, **flags)
        rows = distillation_ppo_loss(actor, distillation, data=batch, student_logits=student_logits)
        loss = rows["distillation_losses"].sum() + policy_loss(student_logits).sum()
        return torch.autograd.grad(loss, leaf)[0]

    alone = gradient(lambda z: z[..., :0], distillation_only=True)
    both = alone.clone()
    both[..., 0] += 1
    same(gradient(InPlace.apply, distillation_only=False), both)
    with torch.no_grad():
        assert not distillation_ppo_loss(actor, distillation, data=micro_batch(), student_logits=leaf)[
            "distillation_losses"
        ].requires_grad


def test_options_of_a_divergence(same):
    student_logits = logits_of_the_batch().unsqueeze(0)
    ours = {"config_class": "potstill.integrations.verl.LossConfig"}
    default, same_beta, other = (
        run("potstill_jsd_bucket", student_logits, **options)[1]
        for options in ({}, ours | {"divergence_options": {"beta": 0.5}}, ours | {"divergence_options": {"beta": 0.9}})
    )
    same(default, same_beta)
    assert default != other


def test_the_page(blocks):
    """Its settings are settings of verl, and lead to what it says."""
    command, more = (re.findall(r"\S+=\S+", block) for block in blocks("verl.md", "bash"))
    folder = Path(verl.__file__).parent / "trainer/config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        config = hydra.compose("ppo_trainer", [*command[1:], *more])
    loss = omega_conf_to_dataclass(config.distillation.distillation_loss)
    assert isinstance(loss, integration.LossConfig)
    assert loss.loss_settings.use_topk and loss.topk == 64 and loss.diagnostics
    assert loss.divergence_options == {"beta": 0.9}
    assert loss.log_prob_min_clamp is None and not loss.use_policy_gradient
    assert not config.actor_rollout_ref.model.use_fused_kernels
    module = config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES
    assert command[0] == f"VERL_USE_EXTERNAL_MODULES={module}" and module == integration.__name__


def test_refusals(monkeypatch):
    student_logits = logits_of_the_batch().unsqueeze(0)
    with pytest.raises(NotImplementedError, match=r"'torchtitan'.*fsdp"):
        run(DROP, student_logits, strategy="torchtitan")
    with pytest.raises(ValueError, match="log_prob_min_clamp only goes with"):
        run("potstill_forward_kl_bucket", student_logits, log_prob_min_clamp=-10.0)
    actor, distillation = settings(DROP)
    batch = micro_batch()
    assign_non_tensor(batch, use_fused_kernels=True)
    with pytest.raises(NotImplementedError, match=r"use_fused_kernels=False"):
        distillation_ppo_loss(actor, distillation, model_output={}, data=batch)
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    with pytest.raises(ImportError, match=r"0\.10\.0: install verl==0\.9\.1"):
        integration.install()


def test_verl_imports_it_by_itself():
    """In a fresh process, with nothing but the variable set, both of verl's doors know the modes."""
    code = (
        "import verl; from verl.trainer.distillation import losses; from verl.workers.config import *;"
        f"DistillationLossConfig(loss_mode={DROP!r}); print(losses.compute_topk_loss.__module__)"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "potstill.integrations.verl"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert found.stdout.split()[-1:] == ["potstill.integrations.verl"], found.stderr
    assert losses.get_distillation_loss_settings(DROP).use_topk

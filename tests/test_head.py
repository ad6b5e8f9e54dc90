"""PotstillHead in the lm_head slot: alone, tied and untied, under DDP and FSDP2 on two gloo ranks."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from potstill import PotstillHead, TeacherTopK, topk_distillation_loss

VOCAB, SEQUENCES, LENGTH, K = 101, 4, 7, 5


def tiny_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=tied, **sizes)
    return LlamaForCausalLM(config).double()


def batch() -> tuple[torch.Tensor, TeacherTopK, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    input_ids = torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator)
    teacher_logits = torch.randn(SEQUENCES, LENGTH, VOCAB, generator=generator, dtype=torch.float64)
    mask = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
    mask[0, :3] = False
    return input_ids, TeacherTopK.from_logits(teacher_logits, K), mask


def loss_of(model, head, rows, memory="auto"):
    input_ids, teacher, mask = batch()
    rows_of_teacher = TeacherTopK(*(x[rows] for x in (teacher.token_ids, teacher.log_probs, teacher.rest_log_prob)))

    def score(logits):
        return topk_distillation_loss(
            logits, rows_of_teacher, mask=mask[rows], num_tokens=mask.sum(), memory=memory
        ).loss

    with head.scoring(score):
        outputs = model(input_ids=input_ids[rows])
    return head.loss_after(outputs.logits)


def train_one_process(tied: bool, steps: int = 2) -> dict[str, torch.Tensor]:
    """Plain model, full logits, no head: what every other way must equal."""
    model = tiny_model(tied)
    input_ids, teacher, mask = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        topk_distillation_loss(model(input_ids=input_ids).logits, teacher, mask=mask).loss.backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("memory", ["recompute", "single_pass"])
def test_equals_the_logits_path(tied, memory):
    model = tiny_model(tied)
    head = PotstillHead.install(model)
    assert PotstillHead.install(model) is head
    assert (head.weight is model.model.embed_tokens.weight) == tied
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, head, slice(None), memory).backward()
        optimizer.step()
    want = train_one_process(tied)
    assert want.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, want[name], rtol=0, atol=1e-15)


def test_outside_scoring_it_is_the_linear_layer():
    plain, model = tiny_model(False), tiny_model(False)
    PotstillHead.install(model)
    input_ids = batch()[0]
    assert torch.equal(model(input_ids=input_ids).logits, plain(input_ids=input_ids).logits)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_an_adapted_head_is_refused():
    model = tiny_model(False)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(TypeError, match=r"Sequential.*merge an adapter"):
        PotstillHead.install(model)


def test_loss_after_needs_a_forward_in_scoring():
    head = PotstillHead.install(tiny_model(False))
    with pytest.raises(RuntimeError, match="scoring"):
        head.loss_after(torch.zeros(1))


def test_the_logits_that_a_softcap_would_alter_carry_nothing():
    model = tiny_model(False)
    head = PotstillHead.install(model)
    seen = []
    with head.scoring(lambda logits: seen.append(logits.hidden) or logits.hidden.sum()):
        logits = model(input_ids=batch()[0]).logits
    assert logits.shape[-1] == 0
    assert torch.equal(head.loss_after(torch.tanh(logits / 30) * 30), seen[0].sum())


def worker(rank: int, port: int, failures) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    rows = slice(rank * 2, rank * 2 + 2)
    for tied in (False, True):
        want = train_one_process(tied)
        for engine in ("ddp", "fsdp2", "fsdp2 root only"):
            model = tiny_model(tied)
            head = PotstillHead.install(model)
            wrapped = model
            if engine == "ddp":
                wrapped = DistributedDataParallel(model)
            else:
                for layer in model.model.layers if engine == "fsdp2" else ():
                    fully_shard(layer)
                fully_shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                # DDP and FSDP average gradients over ranks, the loss is divided by the global count: times 2.
                (loss_of(wrapped, head, rows) * 2).backward()
                optimizer.step()
            for name, parameter in model.named_parameters():
                value = parameter.detach()
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                error = (value - want[name]).abs().max().item()
                if error > 1e-15:
                    failures.append(f"rank {rank} {engine} tied={tied} {name}: {error:.1e}")
    dist.destroy_process_group()


def test_ddp_and_fsdp2_equal_one_process():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    failures = mp.Manager().list()
    mp.spawn(worker, args=(port, failures), nprocs=2)
    assert not list(failures), "\n".join(failures)

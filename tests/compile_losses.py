"""Compare compiled losses with eager ones: python compile_losses.py logits|linear|single_pass|full_vocab [fullgraph].

A process of its own, since the shape checks of the test run cannot be compiled.
"""

import sys

import torch

from potstill import LinearLogits, TeacherTopK, full_vocab_distillation_loss, topk_distillation_loss

V, H, K = 37, 8, 4


def topk(logits, token_ids, log_probs, mask, **options):
    return topk_distillation_loss(logits, TeacherTopK(token_ids, log_probs), mask=mask, **options).loss


LOSSES = {
    "logits": lambda h, w, *rows: topk(h @ w.T, *rows[:3]),
    "linear": lambda h, w, *rows: topk(LinearLogits(h, w), *rows[:3]),
    "single_pass": lambda h, w, *rows: topk(LinearLogits(h, w), *rows[:3], memory="single_pass"),
    "full_vocab": lambda h, w, *rows: full_vocab_distillation_loss(LinearLogits(h, w), rows[3], mask=rows[2]).loss,
}


def main(form: str, fullgraph: bool) -> None:
    torch.manual_seed(0)
    loss = LOSSES[form]
    compiled = torch.compile(loss, fullgraph=fullgraph, backend="aot_eager")
    for n in (5, 7, 8, 5):
        for mask in (torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)):
            hidden, weight = torch.randn(n, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
            teacher_logits = torch.randn(n, V)
            teacher = TeacherTopK.from_logits(teacher_logits, K)
            given = (hidden, weight, teacher.token_ids, teacher.log_probs, mask, teacher_logits)
            got, want = compiled(*given), loss(*given)
            torch.testing.assert_close(got, want)
            for a, b in zip(
                torch.autograd.grad(got, (hidden, weight)), torch.autograd.grad(want, (hidden, weight)), strict=True
            ):
                torch.testing.assert_close(a, b)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(f"{form}: {graphs} graphs for 3 numbers of rows")
    assert not fullgraph or graphs <= 2, graphs


if __name__ == "__main__":
    main(sys.argv[1], "fullgraph" in sys.argv)

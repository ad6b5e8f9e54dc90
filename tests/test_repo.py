"""The promises of the files around the code: what README shows runs, what it names exists."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_readme_python_runs_and_both_versions_agree() -> None:
    """Every ```python block runs, in order, in one namespace; the names they take as given are made here, small."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    student = LlamaForCausalLM(config)
    teacher_log_probs, teacher_ids = torch.randn(2, 6, 97).log_softmax(-1).topk(8)
    given = {
        "student": student,
        "batch": {"input_ids": torch.randint(97, (2, 7))},
        "teacher_ids": teacher_ids,
        "teacher_log_probs": teacher_log_probs,
        "mask": torch.rand(2, 6) < 0.7,
    }
    before, after, over_ranks = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    exec(before, given)
    dense_gradient = student.lm_head.weight.grad.clone()

    student.zero_grad()
    exec(after, given)
    assert torch.isfinite(given["out"].loss) and given["out"].loss > 0
    assert student.lm_head.weight.grad.abs().sum() > 0

    # One rank of one is the whole vocabulary.
    whole = given["out"].loss
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    exec(over_ranks, given)
    dist.destroy_process_group()
    torch.testing.assert_close(given["out"].loss, whole)

    # README: `tail="drop"` gives the first version's number.
    student.zero_grad()
    exec(after.replace("mask=mask", 'tail="drop", mask=mask'), given)
    torch.testing.assert_close(given["out"].loss, given["loss"])
    torch.testing.assert_close(student.lm_head.weight.grad, dense_gradient)


def test_the_check_in_normalisation_runs() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/normalisation.md").read_text(), re.M | re.DOTALL)
    exec(block, {})


def test_readme_layout_names_every_folder_and_no_other() -> None:
    named = set(re.findall(r"^\| `([^`]+)` \|", README, flags=re.MULTILINE))
    assert {folder for folder in named if not (ROOT / folder).is_dir()} == set()
    packages = {f"src/potstill/{init.parent.name}" for init in ROOT.glob("src/potstill/*/__init__.py")}
    assert packages <= named


def test_make_targets_that_are_documented_exist() -> None:
    documented = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", documented, flags=re.MULTILINE)) <= targets


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/measured.md", "docs/teacher-payload.md"]
)
def test_links_to_files_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (ROOT / name).parent.joinpath(link).exists()]
    assert missing == []


def test_chat_prompts_are_well_formed_and_the_held_out_ones_are_new() -> None:
    train, heldout = (
        [json.loads(line)["messages"] for line in (ROOT / "recipes/data" / name).open(encoding="utf-8")]
        for name in ("chat-prompts.jsonl", "chat-heldout.jsonl")
    )
    for messages in train + heldout:
        (message,) = messages
        assert message["role"] == "user" and message["content"].strip()
    prompts = [messages[0]["content"] for messages in train + heldout]
    assert len(set(prompts)) == len(prompts) == 224

"""What is wrong with a teacher's rows is said in words, and nothing is said of rows that are right."""

import dataclasses
import re

import pytest
import torch

from potstill import SampledTargets, TeacherTopK
from potstill.cli import main
from potstill.inspector import Figures, add, findings_of, inspect, sample_lines, temperature_ignored
from potstill.teachers.cache import CacheWriter
from potstill.teachers.payload import PayloadInfo, Sample, fingerprint, write_payload
from potstill.train import load_recipe
from potstill.train.load import build_trainer, training_arguments
from train_fixtures import make_model, make_tokenizer, write_recipe

V, K, EOS = 500, 16, 2
INFO = PayloadInfo(V, "", "t", K, eos_token_ids=(EOS,))


def text(n=30, *, seed=0, temperature=1.0, rows_at=1.0, end=True):
    """Samples whose tokens are drawn from the distributions that the rows describe at temperature `rows_at`."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(n):
        logits = 4 * torch.randn(8, V, generator=generator)
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        if end:
            tokens[-1] = EOS
        rows = TeacherTopK.from_logits(logits, K, temperature=rows_at)
        rows = dataclasses.replace(rows, temperature=temperature)
        samples.append(Sample(f"s{i}", [1, 3 + i], tokens.tolist(), rows))
    return samples


def findings(samples, info=INFO):
    figures = Figures()
    for sample in samples:
        add(figures, sample, info)
    return list(findings_of(figures, info))


def moved(sample, by):
    """Row i is what row i + by should be."""
    return sample._replace(
        rows=dataclasses.replace(
            sample.rows,
            token_ids=sample.rows.token_ids.roll(-by, 0),
            log_probs=sample.rows.log_probs.roll(-by, 0),
            rest_log_prob=sample.rows.rest_log_prob.roll(-by, 0),
        )
    )


def with_rows(sample, **changes):
    return sample._replace(rows=dataclasses.replace(sample.rows, **changes))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_nothing_is_wrong_with_rows_that_are_right(temperature):
    info = dataclasses.replace(INFO, temperature=temperature)
    for seed in range(5):
        assert findings(text(seed=seed, temperature=temperature, rows_at=temperature), info) == []
    targets = SampledTargets.from_logits(torch.randn(8, V), K)
    sampled = [x._replace(rows=targets) for x in text()]
    assert findings(sampled, dataclasses.replace(INFO, chosen="threshold")) == []


FLAT = {"log_probs": torch.full((8, K), -torch.tensor(float(V)).log().item())}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: with_rows(x, **FLAT), "uniform rows: 100.0% have the same probability"),
        (lambda x: with_rows(x, log_probs=x.rows.log_probs + 1), "mass > 1: "),
        (lambda x: with_rows(x, log_probs=x.rows.log_probs + 1), "impossible rows in 30 samples, first sample 's0': "),
        (lambda x: with_rows(x, log_probs=x.rows.log_probs * float("nan")), "impossible rows in 30 samples"),
        (lambda x: moved(x, 1), "shifted by one: .* if row i is taken for row i [+]1"),
        (lambda x: moved(x, -1), "shifted by one: .* if row i is taken for row i -1"),
        (lambda x: with_rows(x, token_ids=(x.rows.token_ids + 250) % V), "wrong tokenizer, or a text that the .* of"),
        (lambda x: x._replace(sample_id="s0"), "1 sample ids come more than once, such as 's0'"),
        (lambda x: x._replace(completion_ids=[*x.completion_ids[:-1], 9]), "truncated: 100% of the completions stop"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    found = findings([change(x) for x in text()])
    assert any(re.search(message, finding) for finding in found), found


@pytest.mark.parametrize("temperature", [2.0, 1.5, 0.5])
def test_an_ignored_temperature(temperature):
    info = dataclasses.replace(INFO, temperature=temperature)
    (found,) = findings(text(60, temperature=temperature), info)
    assert found.startswith(f"temperature ignored: rows of temperature {temperature:g} should be")
    assert temperature_ignored([], temperature) is None


def test_figures_of_a_payload_by_hand(tmp_path):
    half = torch.tensor([[0.5, 0.25]]).log()
    rows = TeacherTopK(torch.tensor([[EOS, 7]]), half, torch.tensor([0.25]).log())
    one = Sample("one", [1, 4, 5], [EOS], rows)
    info = dataclasses.replace(INFO, top_k=2)
    write_payload(tmp_path / "a.parquet", [one, one._replace(sample_id="two")], info)
    report = inspect(tmp_path / "a.parquet")
    assert report.findings == [] and report.lines[-1] == "nothing looks wrong"
    figures = dict(line.split("  ", 1) for line in report.lines[: report.lines.index("")])
    figures = {name.strip(): value.strip() for name, value in figures.items()}
    assert figures["samples"] == "2, of which 1 repeat another's prompt and completion"
    assert figures["mass of the ids"] == "0.7500 on average, at least 0.7500"
    assert figures["entropy"] == "1.040 nats, all other tokens as one"  # (ln 2) / 2 + 2 (ln 4) / 4
    assert figures["effective K"] == "2.8"  # e^1.040
    assert figures["mass of EOS"] == "0.5000"
    assert figures["completions with an end"] == "100.0%"
    assert figures["prompt length"] == "3.0 tokens on average, at most 3"


def test_shards_of_two_weight_versions(tmp_path):
    from test_cache import changed_index

    with CacheWriter(tmp_path / "c", INFO, {}, rows_per_shard=8) as writer:
        for sample in text(2):
            writer.add(sample)
    again = dataclasses.replace(INFO, weight_version="step 9")
    sha256 = write_payload(tmp_path / "c" / "shard-00001.parquet", text(2)[1:], again)
    changed_index(tmp_path / "c", lambda index: index["shards"][1].update(sha256=sha256))
    (found,) = inspect(tmp_path / "c").findings
    assert found == "mixed weight versions: '', 'step 9'; keep the shards of one capture"


def test_a_sample_is_shown_as_text_that_a_terminal_does_not_obey(tmp_path):
    class Decoder:
        def decode(self, ids):
            return "\x1b[2J" if ids == [EOS] else f"t{ids[0]}"

    lines = sample_lines(text(1)[0]._replace(sample_id="\x1b]0;x"), Decoder())
    assert not any("\x1b" in line for line in lines)
    assert lines[1] == "prompt: 't1'" and lines[-1].startswith("  '\\x1b[2J'")


def test_the_command(tmp_path, capsys):
    file = write_recipe(tmp_path)
    folder = tmp_path / "cache"
    given = ["rollout.lmbda=1.0", "rollout.max_new_tokens=40", f"cache.folder={folder}"]
    assert main(["cache", str(file), *given]) == 0
    capsys.readouterr()
    assert main(["inspect", str(folder), "--sample", "3"]) in (0, 1)
    shown = capsys.readouterr().out
    assert "sample '3.0'" in shown and "prompt: '<bos> a 3 b 0 c'" in shown
    assert main(["inspect", str(folder), "--sample", "99"]) == 2
    assert "there is no sample number 99" in capsys.readouterr().err
    other = make_tokenizer([*make_tokenizer().get_vocab(), "new"])
    make_model().save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    assert main(["inspect", str(folder), "--tokenizer", str(tmp_path / "other")]) == 1
    assert f"is {fingerprint(other.get_vocab())}" in capsys.readouterr().out
    for wrong in (tmp_path / "none", tmp_path / "none.parquet", tmp_path / "none.pt", file, tmp_path):
        assert main(["inspect", str(wrong)]) == 2
        assert capsys.readouterr().err.startswith("potstill: ")


@pytest.mark.parametrize("targets", ["top_k", "threshold"])
def test_a_skipped_step(tmp_path, targets):
    recipe = load_recipe(write_recipe(tmp_path), [f"loss.targets={targets}"])
    trainer = build_trainer(recipe, training_arguments(recipe))
    trainer.get_batch_samples(iter([trainer.train_dataset[:4]]), 1, torch.device("cpu"))
    trainer._report_skip(float("nan"))
    skipped = sorted((tmp_path / "out").glob("skipped-step-*.pt"))
    report = inspect(skipped[0])
    assert any("4, of which" in line for line in report.lines)
    (tmp_path / "broken.pt").write_bytes(skipped[0].read_bytes()[:500])
    assert main(["inspect", str(tmp_path / "broken.pt")]) == 2

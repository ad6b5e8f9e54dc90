"""Caches: what is written is there, whatever the process dies of, and nothing that was not written is read."""

import json
import multiprocessing
import os
import random
import signal
import sys

import pyarrow as pa
import pytest
import torch

from potstill import SampledTargets
from potstill.cli import main
from potstill.folders import FolderInUseError, only_one, replace_file
from potstill.teachers.cache import INDEX, CachedSamples, CacheWriter, read_index
from potstill.teachers.payload import PayloadError, write_payload
from potstill.train import RecipeError, load_recipe
from potstill.train.capture import capture
from test_payload import info, samples
from train_fixtures import write_recipe


def write(folder, found, about=None, **options):
    with CacheWriter(folder, info(), about or {"seed": 1}, **options) as writer:
        for sample in found:
            writer.add(sample)
    return writer


def assert_same(one, other):
    assert one[:3] == other[:3]
    values = {name: x for name, x in vars(one.rows).items() if x is not None}
    for name, x in values.items():
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(getattr(other.rows, name))), name


def test_samples_in_any_order(tmp_path):
    writer = write(tmp_path / "c", samples(7), rows_per_shard=12)
    assert [(x.file, x.samples, x.rows) for x in writer.shards] == [
        ("shard-00000.parquet", 3, 18),
        ("shard-00001.parquet", 2, 17),
        ("shard-00002.parquet", 2, 21),
    ]
    cache = CachedSamples(tmp_path / "c")
    assert len(cache) == 7 and cache.info == info()
    assert [cache[i].sample_id for i in (6, 0, -2, 3)] == ["s6", "s0", "s5", "s3"]
    with CacheWriter(tmp_path / "c", info(), {"seed": 1}) as again:
        assert again.done == 7
        again.add(samples(8)[7])
    assert len(CachedSamples(tmp_path / "c")) == 8
    with pytest.raises(IndexError):
        cache[7]


def test_memory_does_not_grow_with_a_cache(tmp_path):
    write(tmp_path / "c", [x._replace(sample_id=f"{i}") for i in range(40) for x in samples(10)])
    before = pa.total_allocated_bytes()
    cache = CachedSamples(tmp_path / "c")
    entries = sum(x.rows.token_ids.numel() for x in cache)
    assert entries > 50_000  # 6 bytes each
    assert pa.total_allocated_bytes() - before < 50_000


def test_what_is_whole_is_kept_when_the_rest_fails(tmp_path):
    with pytest.raises(RuntimeError), CacheWriter(tmp_path / "c", info(), {}) as writer:
        writer.add(samples(1)[0])
        raise RuntimeError
    assert len(CachedSamples(tmp_path / "c")) == 1
    broken = samples(2)[1]._replace(completion_ids=[1])
    with (
        pytest.raises(PayloadError, match="1 completion tokens but"),
        CacheWriter(tmp_path / "c", info(), {}) as writer,
    ):
        writer.add(broken)
    assert len(CachedSamples(tmp_path / "c")) == 1


def test_one_process_writes_a_folder(tmp_path):
    with only_one(tmp_path / "c"), pytest.raises(FolderInUseError, match=r"another process is writing .*c; wait"):
        write(tmp_path / "c", samples(1))
    write(tmp_path / "c", samples(1))  # it was let go


def test_a_cache_of_something_else_is_not_continued(tmp_path):
    write(tmp_path / "c", samples(1))
    with pytest.raises(PayloadError, match="a cache of another seed: 1, and now it is 2; choose another folder"):
        write(tmp_path / "c", samples(1), {"seed": 2})
    with pytest.raises(PayloadError, match="a cache of another bits: 16, and now it is 8"):
        CacheWriter(tmp_path / "c", info(bits=8), {"seed": 1}).__enter__()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.txt").write_text("mine")
    with pytest.raises(PayloadError, match=r"holds thesis.txt but no cache"):
        write(tmp_path / "d", samples(1))


def changed_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index)
    replace_file(folder / INDEX, json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / INDEX).unlink(), "is no cache: it has no index.json; make one"),
        (lambda f: (f / INDEX).write_text("[" * 100_000), "is no index of a cache"),
        (lambda f: (f / INDEX).write_text("{}"), "is no index of a cache"),
        (lambda f: (f / INDEX).write_bytes(b"\xff"), "is no index of a cache"),
        (lambda f: changed_index(f, lambda x: x.update(format=2)), "has format 2; this version"),
        (lambda f: changed_index(f, lambda x: x["shards"].clear()), "is an empty cache; fill it"),
        (lambda f: changed_index(f, lambda x: x["shards"].append(x["shards"][0])), "is no index of a cache"),
        (lambda f: changed_index(f, lambda x: x["shards"][0].update(file="../c.parquet")), "no plain name"),
        (lambda f: changed_index(f, lambda x: x["shards"][0].update(file="/etc/a.parquet")), "no plain name"),
        (lambda f: changed_index(f, lambda x: x["shards"][0].update(samples=-1)), "has -1 samples"),
        (lambda f: changed_index(f, lambda x: x["shards"][0].update(samples=9)), "samples; index.json says 9"),
        (lambda f: changed_index(f, lambda x: x["shards"][0].update(sha256="0" * 64)), "not the file that was"),
        (lambda f: (f / "shard-00001.parquet").unlink(), "lacks shard-00001.parquet, which its index.json has"),
        (lambda f: (f / "shard-00001.parquet").write_bytes(b"PAR1"), "not the file that was written"),
    ],
)
def test_damaged_caches_are_refused(tmp_path, damage, message):
    write(tmp_path / "c", samples(7), rows_per_shard=12)
    damage(tmp_path / "c")
    with pytest.raises(PayloadError, match=message):
        CachedSamples(tmp_path / "c")


def test_shards_of_two_captures_are_refused(tmp_path):
    folder = tmp_path / "c"
    write(folder, samples(7), rows_per_shard=12)
    sha256 = write_payload(folder / "shard-00001.parquet", samples(2), info(weight_version="2"))
    changed_index(folder, lambda x: x["shards"][1].update(sha256=sha256))
    with pytest.raises(PayloadError, match="has weight_version '2', the first shard '': they are of two captures"):
        CachedSamples(folder)


CAPTURE = ["cache.rows_per_shard=8", "warmup.steps=2", "training.per_device_train_batch_size=3"]


def recipe_of(file, *overrides):
    return load_recipe(file, [*CAPTURE, f"cache.folder={file.parent / 'cache'}", *overrides])


@pytest.fixture
def recipe_file(tmp_path):
    return write_recipe(tmp_path)


def test_a_capture_is_what_the_trainer_would_have_asked(recipe_file):
    folder = capture(recipe_of(recipe_file, "cache.samples_per_prompt=2"))
    cache = CachedSamples(folder)
    assert [x.sample_id for x in cache] == [f"{row}.{turn}" for turn in range(2) for row in range(16)]
    assert all(1 <= len(x.completion_ids) <= 5 for x in cache)
    assert cache.info.eos_token_ids == (2,) and cache.info.top_k == 4 and cache.info.vocab_size == 22
    assert [cache[i].completion_ids for i in range(16)] != [cache[16 + i].completion_ids for i in range(16)]
    assert not (recipe_file.parent / "out").exists()
    with pytest.raises(RecipeError, match="cache has 32 samples; go on with --resume"):
        capture(recipe_of(recipe_file))
    with pytest.raises(RecipeError, match="cache of another samples_per_prompt: 2, and now it is 1"):
        capture(recipe_of(recipe_file), resume=True)
    assert capture(recipe_of(recipe_file, "cache.samples_per_prompt=2"), resume=True) == folder
    assert len(CachedSamples(folder)) == 32


def test_a_capture_of_given_completions(recipe_file):
    rows = [{"prompt": f"a {i}", "completion": f"{i} b"} for i in range(5)]
    (recipe_file.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = ["rollout.lmbda=0", "warmup.steps=0", "loss.targets=threshold", "cache.bits=8"]
    cache = CachedSamples(capture(recipe_of(recipe_file, *overrides)))
    assert [x.completion_ids for x in cache] == [[12 + i, 5, 2] for i in range(5)]
    assert isinstance(cache[0].rows, SampledTargets) and cache.info.chosen == "threshold"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.cache=x"], "teacher.cache='x' is a cache already"),
        (["student={model: x}", "teacher={ema: 0.9}"], "teacher.ema follows a student that is trained"),
        (["loss={estimator: k1, policy_gradient: true}"], "loss.estimator=k1 scores what is sampled"),
        (["teacher.weight=2"], "teacher.weight is 2, which a cache does not keep"),
        (["cache.bits=4"], "cache.bits is 4; expected 16 or 8"),
        (["cache.rows_per_shard=0"], "cache.rows_per_shard is 0; expected 1 or more"),
    ],
)
def test_recipes_without_anything_to_cache(recipe_file, overrides, message, monkeypatch, capsys):
    monkeypatch.setattr("potstill.train.load.load_model", lambda *x: pytest.fail("a model was loaded"))
    assert main(["cache", str(recipe_file), *overrides]) == 2
    assert message in capsys.readouterr().err


def dies_at(file, overrides, number):
    """A capture that is killed at the given one of the moments at which it opens or renames a file of its folder."""
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in ("open", "os.rename") and str(file.parent / "cache") in str(arguments[0]):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    sys.addaudithook(hook)
    capture(recipe_of(file, *overrides), resume=True)


def check_kills(folder, kills, seed):
    """However often a capture is killed: its shards stay as they were, and in the end all samples are there once."""
    dice = random.Random(seed)
    overrides = ["loss.targets=threshold"]  # drawn at random
    file = write_recipe(folder)
    expected = list(CachedSamples(capture(recipe_of(file, *overrides, f"cache.folder={folder / 'undisturbed'}"))))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["potstill.train.capture"])
    died, kept = 0, []
    for _ in range(kills):
        process = context.Process(target=dies_at, args=(file, overrides, dice.randint(1, 12)))
        process.start()
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL), f"seed {seed}: exit code {process.exitcode}"
        died += process.exitcode != 0
        if (folder / "cache" / INDEX).exists():
            shards = read_index(folder / "cache")[1]
            assert shards[: len(kept)] == kept, f"seed {seed}"
            kept = shards
    assert died, f"seed {seed}: every capture came to its end"
    found = list(CachedSamples(capture(recipe_of(file, *overrides), resume=True)))
    assert len(found) == len(expected) == 16
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def test_three_kills_lose_nothing_and_double_nothing(tmp_path):
    check_kills(tmp_path, 3, random.randrange(1 << 30))


@pytest.mark.slow
def test_twenty_kills_lose_nothing_and_double_nothing(tmp_path):
    for round_ in range(4):
        folder = tmp_path / str(round_)
        folder.mkdir()
        check_kills(folder, 5, random.randrange(1 << 30))

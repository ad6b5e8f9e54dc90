"""Teacher rows on disk come back as they were, to coding error, and nothing else is taken for them."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from potstill import SampledTargets, TeacherTopK, topk_distillation_loss
from potstill.teachers.payload import (
    PayloadError,
    PayloadInfo,
    Sample,
    fingerprint,
    read_info,
    read_payload,
    write_payload,
)

V, K = 5_000, 16
INF = float("inf")


def info(**changes):
    return PayloadInfo(**{"vocab_size": V, "tokenizer": "abc", "teacher": "t", "top_k": K, **changes})


def samples(n=3, *, seed=0, k=K, vocab_size=V, temperature=1.0):
    torch.manual_seed(seed)
    found = []
    for i in range(n):
        z = 3 * torch.randn(5 + i, vocab_size)
        rows = TeacherTopK.from_logits(z, k, temperature=temperature)
        found.append(Sample(f"s{i}", [1, 2, 3 + i], rows.token_ids[:, 0].tolist(), rows))
    return found


def in_order(rows):
    """ids and values of live slots, by row, as dictionaries."""
    values = rows.weights if isinstance(rows, SampledTargets) else rows.log_probs
    return [
        {int(i): float(x) for i, x in zip(a, b, strict=True) if i >= 0}
        for a, b in zip(rows.token_ids, values, strict=True)
    ]


@pytest.mark.parametrize("bits, bound", [(16, 1e-3), (8, 5e-2)])
def test_rows_come_back(tmp_path, bits, bound):
    written = samples()
    digest = write_payload(tmp_path / "a.parquet", written, info(bits=bits))
    assert read_info(tmp_path / "a.parquet") == info(bits=bits)
    read = list(read_payload(tmp_path / "a.parquet", digest))
    assert [x.sample_id for x in read] == ["s0", "s1", "s2"]
    for one, other in zip(written, read, strict=True):
        assert (other.prompt_ids, other.completion_ids) == (one.prompt_ids, one.completion_ids)
        assert (other.rows.token_ids.diff(dim=1) > 0).all()
        torch.testing.assert_close(other.rows.rest_log_prob, one.rows.rest_log_prob)
        for ours, theirs in zip(in_order(one.rows), in_order(other.rows), strict=True):
            assert ours.keys() == theirs.keys()
            assert max(abs(theirs[i] - ours[i]) for i in ours) < 25 * bound  # of entries far down
        z = torch.randn(len(one.completion_ids), V)
        losses = [topk_distillation_loss(z, rows).per_token for rows in (one.rows, other.rows)]
        torch.testing.assert_close(*losses, rtol=0, atol=bound)
    assert not list(tmp_path.glob("*.partial"))


def test_ordinary_readers_see_typed_columns(tmp_path):
    write_payload(tmp_path / "a.parquet", samples(), info())
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.schema.field("token_ids").type == pa.list_(pa.list_(pa.int32()))
    assert table.schema.field("below_highest").type == pa.list_(pa.list_(pa.float16()))
    first = table.to_pylist()[0]
    log_probs = [first["highest"][0] - x for x in first["below_highest"][0]]
    assert sum(map(lambda x: 2.718281828**x, log_probs)) == pytest.approx(
        1 - 2.718281828 ** first["rest_log_prob"][0], abs=1e-2
    )


def test_sampled_targets_and_empty_slots_come_back(tmp_path):
    targets = SampledTargets.from_logits(3 * torch.randn(4, V), K, method="random")
    about = info(chosen="random")
    write_payload(tmp_path / "a.parquet", [Sample("x", [1], [2, 3, 4, 5], targets)], about)
    (read,) = read_payload(tmp_path / "a.parquet")
    assert in_order(read.rows) == in_order(targets)

    rows = samples(1)[0].rows
    ids = rows.token_ids.masked_fill(torch.arange(K) % 3 == 0, -1)
    ids[2] = -1  # a row of nothing but rest
    z = torch.randn(5, V)
    rows = TeacherTopK.from_logits(z, token_ids=ids)
    write_payload(
        tmp_path / "b.parquet", [Sample("x", [], [1, 2, 3, 4, 5], rows), Sample("empty", [7], [], rows_of(0))], info()
    )
    read, empty = read_payload(tmp_path / "b.parquet")
    assert [set(x) for x in in_order(read.rows)] == [set(x) for x in in_order(rows)]
    assert empty.completion_ids == [] and empty.rows.token_ids.shape == (0, K)


def rows_of(n):
    return TeacherTopK(torch.empty(n, K, dtype=torch.int64), torch.empty(n, K), torch.empty(n))


def test_two_vocabularies_have_two_fingerprints():
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0}) != fingerprint({"a": 1, "b": 0})


@pytest.mark.parametrize(
    "change, pattern",
    [
        (lambda s: s._replace(completion_ids=[1, 2]), "2 completion tokens but rows.*one row predicts each"),
        (lambda s: s._replace(rows=TeacherTopK(s.rows.token_ids, s.rows.log_probs)), "rest_log_prob"),
        (lambda s: s._replace(rows=TeacherTopK(s.rows.token_ids, s.rows.log_probs + 1, s.rows.rest_log_prob)), "mass"),
        (lambda s: samples(1, temperature=2.0)[0], "temperature 2.0, the payload at 1.0"),
        (lambda s: samples(1, k=K + 1)[0], "more than top_k = 16"),
        (lambda s: s._replace(rows=SampledTargets(s.rows.token_ids, s.rows.log_probs.exp())), "SampledTargets.*top_k"),
    ],
)
def test_samples_that_do_not_fit_are_refused(tmp_path, change, pattern):
    sample = change(samples(1)[0])
    with pytest.raises(PayloadError, match=f"(?s){pattern}"):
        write_payload(tmp_path / "a.parquet", [sample], info())
    assert not (tmp_path / "a.parquet").exists()


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 1 << 21}, {"top_k": V + 1}, {"bits": 4}, {"temperature": 0.0}], ids=str
)
def test_facts_that_cannot_be_are_refused(changes):
    with pytest.raises(PayloadError, match=next(iter(changes))):
        info(**changes)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 not at all PAR1")
    with pytest.raises(PayloadError, match=r"a\.parquet is no whole parquet file"):
        read_info(path)
    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(PayloadError, match="no payload"):
        read_info(path)
    for about, pattern in (
        ({"format": 99}, "format 99"),
        ({"format": 1, "vocab_size": -1}, "no payload"),
        ([], "no payload"),
    ):
        schema = pa.schema({"x": pa.int64()}, metadata={b"potstill": json.dumps(about).encode()})
        pq.write_table(pa.table({"x": [1]}, schema=schema), path)
        with pytest.raises(PayloadError, match=pattern):
            read_info(path)
    schema = pa.schema({"x": pa.int64()}, metadata=info().schema().metadata)
    pq.write_table(pa.table({"x": [1]}, schema=schema), path)
    with pytest.raises(PayloadError, match="other columns"):
        read_info(path)
    with pytest.raises(FileNotFoundError):
        read_info(tmp_path / "none.parquet")


def test_what_a_foreign_writer_gets_wrong_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write_payload(path, samples(2), info())
    for name, pattern in (
        ("completion_ids", "2 completion tokens but"),
        ("highest", "highest has"),
        ("token_ids", "not ascending|outside"),
        ("prompt_ids", "prompt_ids has a token outside"),
    ):
        table = pq.read_table(path)
        line = table.to_pylist()[0]
        wrong = {
            "completion_ids": [1, 2],
            "highest": line["highest"][:-1],
            "token_ids": [row[::-1] for row in line["token_ids"]],
            "prompt_ids": [V],
        }[name]
        broken = pa.Table.from_pylist([{**line, name: wrong}], schema=info().schema())
        pq.write_table(broken, tmp_path / "b.parquet")
        with pytest.raises(PayloadError, match=pattern):
            list(read_payload(tmp_path / "b.parquet"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("payload") / "a.parquet"
    digest = write_payload(path, samples(), info())
    return path, digest, path.read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_or_harmless(whole, data):
    """Any byte changed, or the end cut off: an error with the checksum; without, PayloadError or rows that can be."""
    path, digest, content = whole
    if data.draw(st.booleans(), "cut"):
        damaged = content[: data.draw(st.integers(0, len(content) - 1), "length")]
    else:
        at = data.draw(st.integers(0, len(content) - 1), "position")
        damaged = content[:at] + bytes([content[at] ^ data.draw(st.integers(1, 255), "flip")]) + content[at + 1 :]
    other = Path(path.parent, "b.parquet")
    other.write_bytes(damaged)
    with pytest.raises(PayloadError, match="SHA-256"):
        list(read_payload(other, digest))
    try:
        for sample in read_payload(other):
            sample.rows.validate(V)
    except PayloadError as error:
        assert "b.parquet" in str(error)

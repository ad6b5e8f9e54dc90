"""Prompts: every source gives the same rows, and every mistake names its row."""

import json

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

from potstill.rollouts.dataset import fit_prompts, read_rows, tokenize
from train_fixtures import CHAT_TEMPLATE, make_tokenizer

CHAT = [{"role": "user", "content": "c"}]
ROWS = [{"prompt": "a b", "completion": "c d"}, {"messages": CHAT, "answer": "d"}]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_jsonl(path, rows):
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")


def test_every_source_gives_the_same_rows(tmp_path):
    write_jsonl(tmp_path / "p.jsonl", ROWS)
    columns = ("id", "prompt", "messages", "completion", "answer")
    table = datasets.Dataset.from_dict({column: [row.get(column) for row in ROWS] for column in columns})
    table.to_parquet(tmp_path / "p.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(tiny=table, other=table.select([1])).save_to_disk(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    table.to_parquet(tmp_path / "plain" / "train.parquet")
    assert read_rows(tmp_path / "p.jsonl") == ROWS
    assert read_rows(tmp_path / "p.jsonl", limit=1) == ROWS[:1]
    assert read_rows(tmp_path / "p.parquet") == ROWS
    assert read_rows(tmp_path / "p.parquet", limit=1) == ROWS[:1]
    assert read_rows(tmp_path / "saved") == ROWS
    assert read_rows(tmp_path / "splits", split="other") == ROWS[1:]
    assert read_rows(tmp_path / "plain") == ROWS  # a folder that load_dataset understands, as it does a hub id
    assert read_rows(tmp_path / "plain", split="train", limit=1) == ROWS[:1]
    with pytest.raises(ValueError, match=r"split is None, but .*splits has tiny, other; name one of them"):
        read_rows(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"split is tyni, but .*splits has tiny, other"):
        read_rows(tmp_path / "splits", split="tyni")


def test_tables_are_checked_like_lines(tmp_path):
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": " "}]).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet, row 2: `prompt` is empty; write one"):
        read_rows(tmp_path / "p.parquet")
    datasets.Dataset.from_list([{"text": "a"}]).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet has the columns text; expected `prompt` or `messages`"):
        read_rows(tmp_path / "p.parquet")


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "a"', r"line 2: Expecting ',' delimiter at character 15$"),
        ("[1]", "line 2: expected a JSON object"),
        ('{"text": "a"}', "line 2: expected exactly one of `prompt` and `messages`; the keys are text"),
        ('{"prompt": "a", "messages": []}', "line 2: expected exactly one"),
        ('{"prompt": 3}', "line 2: `prompt` is 3; expected text"),
        ('{"prompt": ""}', "line 2: `prompt` is empty; write one, or leave the row out"),
        ('{"messages": []}', "line 2: `messages` must be a list of objects with `role` and `content`, at least one"),
        ('{"messages": [{"role": "user"}]}', "line 2: `messages` must be a list of objects with `role` and `content`"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2: `messages` end with the assistant's"),
        ('{"prompt": "a", "answer": 7}', "line 2: `answer` is 7; expected text: put it in quotes"),
        ('{"prompt": "a", "completion": ["b"]}', r"line 2: `completion` is \['b'\]; expected text"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"p\.jsonl, {message}"):
        read_rows(path)


def test_a_line_that_is_no_utf_8_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: 'utf-8' codec can't decode byte 0xe9"):
        read_rows(tmp_path / "p.jsonl")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(tmp_path / "p.jsonl")


def test_messages_that_end_with_the_assistants_are_a_prompt_and_its_completion(tmp_path):
    turn = [{"role": "assistant", "content": "d e"}]
    write_jsonl(tmp_path / "p.jsonl", [{"messages": CHAT + turn}])
    assert read_rows(tmp_path / "p.jsonl") == [{"messages": CHAT, "completion": "d e"}]
    write_jsonl(tmp_path / "p.jsonl", [{"messages": CHAT + turn, "completion": "d"}])
    with pytest.raises(ValueError, match=r"line 1: .* and no `completion` besides"):
        read_rows(tmp_path / "p.jsonl")


def test_tokenize_prompts_and_chats():
    tokenizer = make_tokenizer()
    assert tokenize([{"prompt": "a b", "answer": "c"}, {"prompt": "a", "completion": "c d"}], tokenizer) == [
        {"prompt_ids": [1, 4, 5], "answer": "c", "completion_ids": None},
        {"prompt_ids": [1, 4], "answer": None, "completion_ids": [6, 7, 2]},  # with its EOS
    ]
    chat = [{"messages": CHAT}]
    with pytest.raises(ValueError, match="it has no chat template"):
        tokenize(chat, tokenizer)
    with pytest.raises(ValueError, match="the tokenizer refuses 'a z': WordLevel error"):
        tokenize([{"prompt": "a z"}], tokenizer)
    bare = make_tokenizer()
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(ValueError, match="has no token; a prompt needs at least one"):
        tokenize([{"prompt": "\t"}], bare)
    tokenizer.chat_template = CHAT_TEMPLATE
    (prompt,) = tokenize(chat, tokenizer)
    assert tokenizer.decode(prompt["prompt_ids"], skip_special_tokens=True) == "a c b"  # b: the assistant's turn
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ValueError, match=r"the tokenizer refuses \[.*\]: no such role"):
        tokenize(chat, tokenizer)


def test_long_prompts_are_dropped_truncated_or_refused_and_counted():
    prompts = tokenize([{"prompt": "a b c"}, {"prompt": "a"}], make_tokenizer())

    def ids(*arguments):
        rows, long = fit_prompts(prompts, *arguments)
        return [row["prompt_ids"] for row in rows], long

    assert ids(3, "drop") == ([[1, 4]], 1)
    assert ids(3, "truncate") == ([[4, 5, 6], [1, 4]], 1)
    assert ids(4, "refuse") == ([[1, 4, 5, 6], [1, 4]], 0)
    with pytest.raises(ValueError, match="prompt 1 has 4 tokens, and 1 in all have more than max_prompt_tokens=3"):
        ids(3, "refuse")
    with pytest.raises(ValueError, match="all 2 prompts have more than 1 tokens; raise max_prompt_tokens"):
        ids(1, "drop")

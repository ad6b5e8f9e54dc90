"""Prompts: read from JSONL, parquet or a Hugging Face dataset, checked row by row, turned into token ids."""

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from transformers import PreTrainedTokenizerBase

COLUMNS = ("prompt", "messages", "completion", "answer", "teacher_id")


class _Prompt(TypedDict):
    prompt_ids: list[int]
    answer: str | None
    completion_ids: list[int] | None


class PromptRow(_Prompt, total=False):
    """A prompt as token ids, and what the data has for it: the answer, and a completion with its EOS.

    Some rows say more of their teacher: its name where there are several (`teacher_id`), another prompt that it reads
    in place of the student's (`teacher_prompt_ids`), and what the row's tokens weigh in the loss (`weight`, else 1).
    """

    teacher_id: str
    teacher_prompt_ids: list[int]
    weight: float


def read_rows(
    path: str | Path,
    name: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    more_columns: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Read rows with a `prompt` text or chat `messages`, and optionally a `completion` and an `answer` text.

    Messages that end with the assistant's are a prompt and its completion.

    Args:
        path: a .parquet file; any other file is JSONL, one object per line, empty lines skipped. Else a folder that
            `Dataset.save_to_disk` wrote or that `load_dataset` reads, or the id of a dataset on the hub.
        name: the dataset's configuration.
        split: the dataset's split; may be left out where there is only one.
        limit: stop after so many rows.
        more_columns: further columns of a table to keep.

    Raises:
        ValueError: a row is not as described, naming file, line and remedy; there is no such split, or no row at all.
        OSError: the file cannot be read.
    """
    is_file = Path(path).is_file()
    if is_file and Path(path).suffix.lower() != ".parquet":
        unit, numbered = "line", _lines(path)
    else:
        unit, numbered = (
            "row",
            enumerate(
                _parquet_rows(path, more_columns) if is_file else _dataset_rows(path, name, split, more_columns),
                start=1,
            ),
        )
    rows: list[dict[str, Any]] = []
    for number, row in islice(numbered, limit):
        try:
            rows.append(_checked(row))
        except ValueError as error:
            raise ValueError(f"{path}, {unit} {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows; expected some with `prompt` or `messages`")
    return rows


def _lines(path: str | Path) -> Iterable[tuple[int, Any]]:
    with open(path, "rb") as lines:
        yield from ((number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip())


def _parquet_rows(path: str | Path, more_columns: Collection[str]) -> Iterable[dict[str, Any]]:
    from pyarrow import parquet

    return _known_columns(parquet.read_table(path), path, more_columns).to_pylist()


def _dataset_rows(
    path: str | Path, name: str | None, split: str | None, more_columns: Collection[str]
) -> Iterable[dict[str, Any]]:
    import datasets

    saved = Path(path)
    if (saved / "dataset_info.json").is_file() or (saved / "dataset_dict.json").is_file():
        dataset: Any = datasets.load_from_disk(path)
    else:
        dataset = datasets.load_dataset(str(path), name, split=split)
    if isinstance(dataset, Mapping):
        if split is None and len(dataset) == 1:
            split = next(iter(dataset))
        if split not in dataset:
            raise ValueError(f"split is {split}, but {path} has {', '.join(dataset)}; name one of them")
        dataset = dataset[split]
    return _known_columns(dataset, path, more_columns)


def _known_columns(table: Any, path: str | Path, more_columns: Collection[str]) -> Any:
    if not {"prompt", "messages"} & set(table.column_names):
        raise ValueError(f"{path} has the columns {', '.join(table.column_names)}; expected `prompt` or `messages`")
    known = [column for column in (*COLUMNS, *more_columns) if column in table.column_names]
    return table.select_columns(known) if hasattr(table, "select_columns") else table.select(known)


def _checked(row: Any) -> dict[str, Any]:
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except json.JSONDecodeError as error:
            raise ValueError(f"{error.msg} at character {error.colno}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object with `prompt` or `messages`, got {type(row).__name__}")
    row = {key: value for key, value in row.items() if value is not None}  # tables have every column in every row
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"expected exactly one of `prompt` and `messages`; the keys are {', '.join(row) or 'none'}")
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise ValueError(f"`prompt` is {row['prompt']!r}; expected text (a conversation goes into `messages`)")
    if "prompt" in row and not row["prompt"].strip():
        raise ValueError("`prompt` is empty; write one, or leave the row out")
    for key in ("completion", "answer", "teacher_id"):
        if not isinstance(row.get(key, ""), str):
            raise ValueError(f"`{key}` is {row[key]!r}; expected text: put it in quotes")
    return row if "prompt" in row else _checked_chat(row)


def _checked_chat(row: dict[str, Any]) -> dict[str, Any]:
    messages = row["messages"]
    if not (
        isinstance(messages, list)
        and messages
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages)
    ):
        raise ValueError("`messages` must be a list of objects with `role` and `content`, at least one")
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    if messages[-1]["role"] != "assistant":
        return {**row, "messages": messages}
    completion = messages.pop().get("content")
    if not messages or not isinstance(completion, str) or "completion" in row:
        raise ValueError(
            "`messages` end with the assistant's, which is then the completion: expected text, after other messages, "
            "and no `completion` besides"
        )
    return {**row, "messages": messages, "completion": completion}


def tokenize(rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[PromptRow]:
    """Turn rows into prompts as token ids, with the special tokens that the tokenizer puts before a text.

    A completion gets the tokenizer's EOS at its end.

    Raises:
        ValueError: the tokenizer or its chat template refuses a row, or a prompt has no token at all.
    """
    prompts: list[PromptRow] = []
    for row in rows:
        completion_ids = None
        if "completion" in row:
            completion_ids = _token_ids(row["completion"], tokenizer, add_special_tokens=False)
            completion_ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        prompt_ids = tokenize_prompt(row.get("prompt", row.get("messages")), tokenizer)
        prompt: PromptRow = {"prompt_ids": prompt_ids, "answer": row.get("answer"), "completion_ids": completion_ids}
        prompts.append(prompt | ({"teacher_id": row["teacher_id"]} if "teacher_id" in row else {}))
    return prompts


def tokenize_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """A text with the special tokens before it, or a chat by the tokenizer's template up to the assistant's turn.

    Raises:
        ValueError: the tokenizer or its chat template refuses it, or it has no token at all.
    """
    if ids := _token_ids(prompt, tokenizer):
        return ids
    raise ValueError(f"the prompt {prompt!r} has no token; a prompt needs at least one")


def _token_ids(text: Any, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[int]:
    ids: Any
    try:
        if isinstance(text, str):
            ids = tokenizer(text, **options).input_ids
        elif tokenizer.chat_template is not None:
            ids = tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
        else:
            raise ValueError("it has no chat template; use `prompt`, or set tokenizer.chat_template")
    except Exception as error:  # templates and tokenizers raise what they like
        raise ValueError(f"the tokenizer refuses {text!r}: {error}") from error
    return list(ids)


def fit_prompts(prompts: list[PromptRow], max_prompt_tokens: int, long_prompts: str) -> tuple[list[PromptRow], int]:
    """Deal with the prompts of more than max_prompt_tokens; returns the prompts, and how many were too long.

    Args:
        prompts: of any length.
        max_prompt_tokens: the longest that stays as it is.
        long_prompts: "refuse" them, "drop" them, or "truncate" them on the left, special tokens included.

    Raises:
        ValueError: a prompt is too long and is to be refused, or all are dropped.
    """
    long = [number for number, row in enumerate(prompts, start=1) if len(row["prompt_ids"]) > max_prompt_tokens]
    if long and long_prompts == "refuse":
        raise ValueError(
            f"prompt {long[0]} has {len(prompts[long[0] - 1]['prompt_ids'])} tokens, and {len(long)} in all have more "
            f"than max_prompt_tokens={max_prompt_tokens}; raise it, or set long_prompts to drop or truncate"
        )
    if long_prompts == "truncate":
        return [{**row, "prompt_ids": row["prompt_ids"][-max_prompt_tokens:]} for row in prompts], len(long)
    if len(long) == len(prompts):
        raise ValueError(
            f"all {len(prompts)} prompts have more than {max_prompt_tokens} tokens; raise max_prompt_tokens"
        )
    return [row for row in prompts if len(row["prompt_ids"]) <= max_prompt_tokens], len(long)

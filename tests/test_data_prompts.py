"""Prompt files: rows become prompts; errors name file and line."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.schema import DataConfig
from asyncrl.data.prompts import DataError, load_prompts

CHAT = [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "2+2?"}]


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_prompts(tmp_path):
    file = write(
        tmp_path / "sums.jsonl",
        {"prompt": CHAT, "answer": 4, "level": 1},
        "",
        {"prompt": "raw text", "answer": "x", "id": "named", "level": 2},
    )
    first, second = load_prompts([file], DataConfig())
    assert (first.prompt_id, first.messages, first.text, first.answer) == ("sums:0", tuple(CHAT), None, "4")
    assert (second.prompt_id, second.messages, second.text, second.answer) == ("named", (), "raw text", "x")
    assert (first.extra, second.extra) == ({"level": 1}, {"level": 2})


def test_the_data_source_is_a_column_or_the_file_s_name(tmp_path):
    rows = [{"prompt": "a", "answer": "x", "data_source": "openai/gsm8k"}, {"prompt": "b", "answer": "y"}]
    file = Path(write(tmp_path / "sums.jsonl", *rows))
    assert [p.data_source for p in load_prompts([file], DataConfig())] == ["openai/gsm8k", "sums"]
    assert [p.extra for p in load_prompts([file], DataConfig())] == [{}, {}]
    assert [p.data_source for p in load_prompts([file], DataConfig(source_key=""))] == ["sums", "sums"]
    for shard in ("train-00001-of-00064", "00001-of-00002"):
        file = file.rename(tmp_path / f"{shard}.jsonl")
        assert load_prompts([file], DataConfig())[1].data_source == (shard if shard[0] == "0" else "train")


def test_parquet_rows_are_the_same_prompts_as_jsonl_rows(tmp_path):
    rows = [{"question": CHAT, "truth": str(i), "level": i} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "sums.parquet", row_group_size=2)
    config = DataConfig(prompt_key="question", answer_key="truth")
    from_parquet = load_prompts([tmp_path / "sums.parquet"], config)
    assert from_parquet == load_prompts([write(tmp_path / "sums.jsonl", *rows)], config)
    assert [p.prompt_id for p in from_parquet] == [f"sums:{i}" for i in range(5)]


def test_without_the_chat_template_messages_are_joined(tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": CHAT, "answer": "4"})
    (prompt,) = load_prompts([file], DataConfig(apply_chat_template=False))
    assert (prompt.text, prompt.messages) == ("Be brief. 2+2?", ())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "cut', "expected a JSON object, found invalid JSON"),
        ("[1, 2]", "expected a JSON object, found list"),
        ({"answer": "4"}, "expected a column 'prompt', found answer"),
        ({"prompt": "2+2?"}, "expected a column 'answer', found prompt"),
        ({"prompt": "", "answer": "4"}, "expected a prompt, found an empty one"),
        ({"prompt": [], "answer": "4"}, "a string or a list of chat messages"),
        ({"prompt": [{"role": "user"}], "answer": "4"}, "string 'role' and 'content'"),
        ({"prompt": "2+2?", "answer": "4", "data_source": 3}, "'data_source': expected a string, found 3"),
        ({"prompt": "2+2?", "answer": ["4"]}, "expected a string or a number, found list"),
    ],
)
def test_a_malformed_row_is_reported_with_file_and_line(tmp_path, line, complaint):
    file = write(tmp_path / "bad.jsonl", {"prompt": "2+2?", "answer": "4"}, "", line)
    with pytest.raises(DataError) as error:
        load_prompts([file], DataConfig())
    assert str(error.value).startswith(f"{file}:3: ")
    assert complaint in str(error.value)


def test_invalid_utf8_is_reported_with_file_and_line(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b'{"prompt": "\xff\xfe", "answer": "4"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: expected a JSON object, found invalid JSON"):
        load_prompts([tmp_path / "bad.jsonl"], DataConfig())


def test_missing_empty_and_unknown_files_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "prompts.csv").write_text("a,b\n")
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 not really")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    for name, complaint in [
        ("gone.jsonl", "no such file"),
        ("empty.jsonl", "no rows"),
        ("none.parquet", "no rows"),
        ("prompts.csv", r"expected a \.jsonl or a \.parquet"),
        ("torn.parquet", "cannot be read as Parquet"),
    ]:
        with pytest.raises(DataError, match=f"{name}.*{complaint}"):
            load_prompts([tmp_path / name], DataConfig())
    with pytest.raises(DataError, match=r"data\.train_files"):
        load_prompts([], DataConfig())


def test_a_repeated_id_is_refused_with_both_lines(tmp_path):
    row = {"prompt": "2+2?", "answer": "4", "id": 7}
    one, two = write(tmp_path / "one.jsonl", row), write(tmp_path / "two.jsonl", {**row, "id": 8}, row)
    with pytest.raises(DataError, match=r"two\.jsonl:2: .* found '7' again, first at .*one\.jsonl:1"):
        load_prompts([one, two], DataConfig())

"""B09: what stops the JSON reader of `datasets`, or passes it silently."""

import json

import pytest

from train.rows import expand_sources, read_rows


def write(path, *lines):
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return str(path)


def contents(source):
    return [row.content for row in read_rows(source)]


MIXED = [
    {"text": "a", "meta": None},
    {"text": "b", "meta": {}},
    {"text": "c", "meta": [1, "x"]},
    {"text": "d", "meta": 1.5, "late": {"key": True}},
]


def test_types_may_change_and_keys_come_late_in_any_order(tmp_path):
    assert contents(write(tmp_path / "a.jsonl", *MIXED)) == MIXED
    assert contents(write(tmp_path / "b.jsonl", *MIXED[::-1])) == MIXED[::-1]


def test_byte_order_mark_carriage_returns_and_blank_lines_are_no_matter(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\xe2\x80\xa8c"}\r\n')
    rows = read_rows(str(path))
    assert [row.content["text"] for row in rows] == ["a", "b\u2028c"]
    assert rows[1].where == f"{path}, line 4"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON"),
        (b'{"text": "a", "text": "b"}', "'text' stands twice"),
        (b'{"messages": [{"role": "user", "role": "x"}]}', "'role' stands twice"),
        (rb'{"text": "\ud83d"}', "surrogate"),
        ('{"text": "ä"}'.encode("latin-1"), "not UTF-8"),
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    ],
)
def test_a_line_that_cant_be_read_is_told_and_the_others_count(tmp_path, line, reason):
    rows = read_rows(write(tmp_path / "a.jsonl", {"text": "a"}, line, {"text": "b"}))
    assert [row.place for row in rows] == ["line 1", "line 2", "line 3"]
    assert isinstance(rows[1].content, ValueError) and reason in str(rows[1].content)
    assert [rows[0].content, rows[2].content] == [{"text": "a"}, {"text": "b"}]


def test_a_whole_surrogate_pair_is_one_character(tmp_path):
    assert contents(write(tmp_path / "a.jsonl", rb'{"text": "\ud83d\ude00"}')) == [{"text": "😀"}]


def test_a_json_file_holds_a_list_an_object_or_lines(tmp_path):
    listed = tmp_path / "list.json"
    listed.write_text("[\n" + ",\n".join(json.dumps(row, indent=1) for row in MIXED) + "\n]\n")
    rows = read_rows(str(listed))
    assert [row.content for row in rows] == MIXED
    assert [row.place for row in rows][:2] == ["line 2", "line 6"]
    assert contents(write(tmp_path / "lines.json", *MIXED)) == MIXED
    assert contents(write(tmp_path / "one.json", MIXED[0])) == MIXED[:1]


def test_a_broken_list_is_told_with_its_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(ValueError, match=r"a\.json, line 2: not JSON"):
        read_rows(str(path))
    path.write_text('[{"text": "a", "text": "b"},\n{"text": "c"}]')
    first, second = read_rows(str(path))
    assert "stands twice" in str(first.content) and second.content == {"text": "c"}
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ValueError, match=r"a\.json: .* nested too deeply"):
        read_rows(str(path))


def test_an_object_over_several_lines_with_a_key_twice_is_one_bad_row(tmp_path):
    (row,) = read_rows(write(tmp_path / "a.json", b'{\n "text": "a",\n "text": "b"\n}'))
    assert row.place == "line 1" and "'text' stands twice" in str(row.content)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_empty_file_is_told(tmp_path, name):
    with pytest.raises(ValueError, match="holds no row"):
        read_rows(write(tmp_path / name))
    if name == "a.json":
        (tmp_path / name).write_text("[ ]")
        with pytest.raises(ValueError, match="holds no row"):
            read_rows(str(tmp_path / name))


def test_files_that_are_missing_or_of_another_kind_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.jsonl: no such file"):
        read_rows(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "a.csv").write_text("text\na\n")
    with pytest.raises(ValueError, match=r"a\.csv: expected a file that ends in \.jsonl"):
        read_rows(str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("no table")
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
        read_rows(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["a.parquet", "a*.parquet", "rows[1].parquet"])
def test_parquet_gives_rows_with_their_numbers_and_its_name_is_no_pattern(tmp_path, name):
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": [{"role": "user", "content": "a"}], "text": None}, {"messages": None, "text": "b"}]
    for file in (name, "ab.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / file)
    found = read_rows(str(tmp_path / name))
    assert [row.content for row in found] == rows and found[1].place == "row 2"


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:test[:3]", ("owner/name", None, "test[:3]")),
        ("owner/name/every-day:validation", ("owner/name", "every-day", "validation")),
    ],
)
def test_a_hub_id_names_set_configuration_and_split(monkeypatch, source, asked):
    def load_dataset(name, config, *, split):
        assert (name, config, split) == asked
        return [{"text": "a"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    (row,) = read_rows(source)
    assert row.where == f"{source}, row 1" and row.content == {"text": "a"}


def test_what_the_hub_refuses_is_told_with_the_form_of_an_id(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"owner/nmae: neither a file here.*owner/name\[/config\]\[:split\].*offline"):
        read_rows("owner/nmae")


def test_a_pattern_stands_for_its_files_in_order_and_for_at_least_one(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c[1].jsonl"):
        write(tmp_path / name, {"text": name})
    assert expand_sources(f"{tmp_path}/[ab].jsonl") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert len(expand_sources(f"{tmp_path.parent}/**/*.jsonl")) >= 3
    with pytest.raises(ValueError, match=r"text-\*\.jsonl: no file matches this pattern"):
        expand_sources(f"{tmp_path}/text-*.jsonl")


@pytest.mark.parametrize("source", ["a.jsonl", "owner/name:train[:10%]", "c[1].jsonl"])
def test_a_file_a_hub_dataset_and_a_name_with_brackets_are_no_pattern(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "c[1].jsonl", {"text": "c"})
    assert expand_sources(source) == [source]

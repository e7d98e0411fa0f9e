"""What may be asked for, what is refused by name before any work, and what users get through `LLM` and the terminal."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from infer import LLM, SamplingParams, StructuredOutputsParams, json_schema
from infer.cli import main
from infer.grammar import Grammar, GrammarCompiler, GrammarState
from infer.tokenizer import NoTokenizer
from tests.tiny_artifact import VOCAB_SIZE, make_tokenizer

COLORS = {"type": "object", "properties": {"color": {"enum": ["red", "blue"]}}, "required": ["color"]}


@pytest.fixture(scope="module")
def llm(artifact: Path) -> LLM:
    return LLM(artifact, strategy="hispec", seed=0)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), VOCAB_SIZE, [0])


# ---- fields ----


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("json", value) for value in (3, ["a"], True)],
        *[("regex", value) for value in (3, re.compile("a"))],
        ("grammar", b"root"),
        *[("choice", value) for value in ("yes", [], [1], {"yes"})],
        *[("json_object", value) for value in (False, 1, "yes")],
        ("whitespace_pattern", " "), ("structural_tag", "{}"), ("disable_additional_properties", True),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_the_name_of_their_field(field, value):
    with pytest.raises(ValueError, match=rf"structured_outputs\.{field}="):
        StructuredOutputsParams(**{"regex": "a"} | {field: value})


@pytest.mark.parametrize("given", [{}, {"json": {}, "regex": "a"}, {"choice": ["a"], "json_object": True}], ids=str)
def test_exactly_one_form_must_be_given(given):
    with pytest.raises(ValueError, match="exactly one of json, regex, choice, grammar, json_object"):
        StructuredOutputsParams(**given)


def test_whitespace_is_said_of_json_only():
    assert StructuredOutputsParams(json_object=True, disable_any_whitespace=True).kind == "json_object"
    with pytest.raises(ValueError, match="disable_any_whitespace"):
        StructuredOutputsParams(regex="a", disable_any_whitespace=True)


def test_sampling_params_take_the_record_and_no_mapping():
    assert SamplingParams(structured_outputs=None).structured_outputs is None
    with pytest.raises(ValueError, match=r"structured_outputs=.*StructuredOutputsParams\("):
        SamplingParams(structured_outputs={"regex": "a"})


# ---- what can't be compiled ----


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("regex", "(a", "parenthesis is not closed"),
        ("regex", r"(a)\1", r"\1 is not supported"),
        ("regex", "\ud800", "surrogates"),
        ("grammar", "root ::= b", '"b" is not defined'),
        ("grammar", 'start: "a" b', "unknown name 'b'"),
        ("choice", ["\ud800"], "surrogates"),
        ("json", "{", "is no JSON"),
        ("json", {"enum": {1}}, "is no JSON"),
        ("json", '{"items":' * 50_000 + "{}" + "}" * 50_000, "nested too deeply"),
        ("json", "[]", "should be an object or bool"),
        ("json", {"type": "int"}, "Unsupported type"),
        ("json", {"type": {"a": 1}}, "should be a string"),
        ("json", {"$ref": 3}, "$ref must be a string"),
        ("json", {"allOf": 3}, "must be an array"),
        ("json", {"type": "string", "pattern": "(a"}, "parenthesis is not closed"),
    ],
)
def test_what_can_not_be_compiled_is_refused_with_xgrammars_reason(compiler, field, value, why):
    with pytest.raises(ValueError, match=rf"(?s)structured_outputs\.{field}=.*{re.escape(why)}") as error:
        compiler.compile(StructuredOutputsParams(**{field: value}))
    assert ".cc:" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        *[({"type": "array", word: {}}, word) for word in ("contains", "not", "if")],
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"minimum": 3}, "minimum needs a type"),
        ({"type": "integer", "maxLength": 3}, "maxLength needs a type"),
        ({"required": ["a"]}, "required needs a type"),
        ({"type": "object", "required": ["a"]}, "required names 'a'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern is not supported together with maxLength"),
        ({"type": "string", "format": "date", "minLength": 3}, "format is not supported together with minLength"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf is supported for integers only"),
        ({"type": "integer", "multipleOf": 5, "minimum": 7}, "multipleOf is not supported together with minimum"),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "allOf of several"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "minimum is not supported beside anyOf"),
        ({"$ref": "#/$defs/a", "maximum": 3, "$defs": {"a": {"type": "integer"}}}, "maximum is not supported beside"),
        ({"enum": ["a", 1], "type": "string"}, "type is not supported beside enum"),
        ({"const": True, "type": "integer"}, "type is not supported beside const"),
        ({"properties": {"a": {"items": {"not": {}}}}}, r"properties\.a\.items\.not is not supported"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, r"anyOf\.1\.not is not supported"),
        ({"$defs": {"a": {"if": {}}}, "type": "null"}, r"\$defs\.a\.if is not supported"),
        (
            {"$ref": "#/components/x", "components": {"x": {"not": {"const": 3}}}},
            r"\$ref='#/components/x' is not among",
        ),
        ({"properties": {"a": {"$ref": "http://x.y/z"}}}, r"properties\.a\.\$ref='http://x.y/z' is not among"),
        ({"$ref": "#/$defs/a"}, r"\$ref='#/\$defs/a' is not among"),
        ({"$ref": "#/$defs/0", "$defs": [{"not": {}}]}, r"\$ref='#/\$defs/0' is not among"),
        ({"$ref": "#/$defs/a%2Fx", "$defs": {"a": {"x": {"not": {}}}}}, r"\$ref='#/\$defs/a%2Fx' is not among"),
        ({"$ref": "#/$defs/a%2Fx", "$defs": {"a": {"x": {"not": {}}}, "a%2Fx": {}}}, r"a%2Fx' is not among"),
        ({"$ref": "#/$defs/a/x", "$defs": {"a": {"x": {"not": {}}}}}, r"\$ref='#/\$defs/a/x' is not among"),
        ({"items": {"$id": "b", "$ref": "#/$defs/a"}, "$defs": {"a": {}}}, r"items\.\$id is not supported inside"),
        *[({"type": "string", "format": name}, f"format='{name}' is not") for name in ("foo", "idn-email", "regex")],
        ({"type": "string", "format": 3}, "format=3 is not"),
        ({"items": {"type": "string", "pattern": "^(?!a).*$"}}, r"items\.pattern=.*: \(\?!a is not supported"),
        ({"type": "object", "patternProperties": {"a$b": {}}}, r"patternProperties\.a\$b: \$ is supported at the end"),
    ],
)
def test_keywords_that_xgrammar_would_ignore_are_refused(compiler, schema, keyword):
    with pytest.raises(ValueError, match=rf"structured_outputs\.json: .*{keyword}"):
        compiler.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        COLORS,
        {"title": "T", "description": "d", "default": 3, "type": "integer", "x-note": "not ours"},
        {"properties": {"not": {"type": "integer"}, "if": {"enum": [{"contains": 1}]}}, "required": ["not"]},
        {"type": ["integer", "null"], "minimum": 3},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "default": None, "title": "Name"},
        {"type": "string", "enum": ["a", "b"]},
        {"type": "number", "const": 1.5},
        {"type": "array", "uniqueItems": False, "prefixItems": [{"type": "string"}], "items": {"$ref": "#"}},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        {"$defs": {"tree": {"properties": {"left": {"$ref": "#/$defs/tree"}}}}, "$ref": "#/$defs/tree"},
        {"$id": "a", "definitions": {"a/b~": {"type": "null"}}, "items": {"$ref": "#/definitions/a~1b~0"}},
        {"type": "string", "pattern": r"^(?:a|[^$^]\d\.)$|^b\^$"},
    ],
    ids=str,
)
def test_usual_schemas_are_taken_as_mapping_and_as_text(compiler, schema):
    text = compiler.compile(StructuredOutputsParams(json=json.dumps(schema)))
    assert text.num_words == -(-VOCAB_SIZE // 32)
    if schema is not True:
        compiler.compile(StructuredOutputsParams(json=schema))


# ---- what is held to ----


FORMATS = {
    "date": ("2024-02-29", "2024-13-01"),
    "time": ("12:30:00Z", "25:00:00Z"),
    "date-time": ("2024-02-29T12:30:00Z", "2024-02-29"),
    "duration": ("P1DT2H", "1D"),
    "email": ("a@b.org", "a.b.org"),
    "hostname": ("a.b.org", "-a"),
    "ipv4": ("1.2.3.4", "1.2.3.256"),
    "ipv6": ("::1", "1:2"),
    "uri": ("http://a.org/b", "b"),
    "uri-reference": ("/b?c", "a b"),
    "uri-template": ("/a/{b}", "{"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000", "123e4567"),
    "json-pointer": ("/a~1", "a"),
    "relative-json-pointer": ("1/a", "/a"),
}


def is_taken(grammar: Grammar, text: str) -> bool:
    """Whether the grammar gives a mask for each token of the text and then for EOS that lets it pass."""
    ids = [*make_tokenizer()(text)["input_ids"], 0]
    masks = GrammarState(grammar).masks(ids, 0, len(ids))
    return all(int(mask[i // 32]) >> (i % 32) & 1 for i, mask in zip(ids, masks, strict=True))


@pytest.mark.parametrize("name", json_schema._FORMATS)
def test_every_format_that_is_taken_is_held_to(compiler, name):
    grammar = compiler.compile(StructuredOutputsParams(json={"type": "string", "format": name}))
    good, bad = FORMATS[name]
    assert is_taken(grammar, json.dumps(good)) and not is_taken(grammar, json.dumps(bad))


def test_references_lead_where_the_pointer_says(compiler):
    defs = {"a/b~": {"type": "null"}, "a": {"b~": {"type": "integer"}}}
    schema = {"$defs": defs, "type": "array", "items": {"$ref": "#/$defs/a~1b~0"}}
    grammar = compiler.compile(StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    assert is_taken(grammar, "[null]") and not is_taken(grammar, "[1]")


@pytest.mark.parametrize(
    ("expression", "taken", "refused"),
    [
        ("^a$|^b$", "b", "ab"),
        ("^(?:a|b){2}$", "ab", "a"),
        ("(?<n>a)b", "ab", "b"),
        (r"[^$^(?]\^\$\(?", "a^$", "(^$"),
        (r"[\w\-]+\.\d", "a-b.1", "a-bx1"),
        (r"\x61\u0062\u{63}", "abc", "ab"),
        (r'a["\\\s]b', "a b", "ab"),
    ],
)
def test_expressions_that_are_taken_mean_what_they_say(compiler, expression, taken, refused):
    for wanted, quote in (
        (StructuredOutputsParams(regex=expression), str),
        (StructuredOutputsParams(json={"type": "string", "pattern": expression}), json.dumps),
    ):
        grammar = compiler.compile(wanted)
        assert is_taken(grammar, quote(taken)) and not is_taken(grammar, quote(refused))


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("a$b", "$ is"), ("a^b", "^ is"), ("(^a)b", "^ is"), ("(a$|b)c", "$ is"), ("[^a]^", "^ is"), (r"\.^a", "^ is"),
        ("^(?!a).*$", "(?!a is"), ("(?=a)b", "(?=a is"), ("a(?<!b)c", "(?<! is"), ("(?i)a", "(?i) is"),
        ("(?P<n>a)", "(?P< is"), (r"\Aab\Z", r"\A is"), (r"a\b", r"\b is"), (r"[\p]", r"\p is"), (r"\p{L}", r"\p is"),
    ],
)  # fmt: skip
def test_parts_of_expressions_that_would_be_ignored_or_misread_are_refused(compiler, expression, what):
    with pytest.raises(ValueError, match=rf"structured_outputs\.regex=.*: {re.escape(what)}"):
        compiler.compile(StructuredOutputsParams(regex=expression))
    with pytest.raises(ValueError, match=rf"structured_outputs\.json: pattern=.*: {re.escape(what)}"):
        compiler.compile(StructuredOutputsParams(json={"type": "string", "pattern": expression}))


@pytest.mark.parametrize(
    "expression",
    ['"', 'a["]', r"\\", r"[\\]", "\t", r"\n", r"\x22", r"\x1f", r"\u005C", r"\u{9}", r"\u{0022}", r'["\t]'],
)
def test_patterns_that_would_break_the_json_around_them_are_refused(compiler, expression):
    for schema in (
        {"type": "string", "pattern": expression},
        {"type": "object", "patternProperties": {expression: {}}},
    ):
        with pytest.raises(ValueError, match=r"(?s)structured_outputs\.json: pattern.* would break the JSON around it"):
            compiler.compile(StructuredOutputsParams(json=schema))
    compiler.compile(StructuredOutputsParams(regex=expression))


@pytest.mark.parametrize("expression", [r'[^"]*', r"[\x00-\x7f]+", r'[^"\\]', ".*", r'[ "]', "[ -~]"])
def test_classes_leave_out_what_json_would_have_to_escape(compiler, expression):
    grammar = compiler.compile(StructuredOutputsParams(json={"type": "string", "pattern": expression}))
    assert is_taken(grammar, '" "')
    assert not any(is_taken(grammar, f'"{text}"') for text in ('"', "\\", "\n"))


def test_without_xgrammar_the_extra_is_named_and_nothing_runs(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.setattr(llm._maker, "_grammars", GrammarCompiler(llm.tokenizer, VOCAB_SIZE, [0]))
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("work has begun"))
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]))
    with pytest.raises(
        ValueError, match=r"structured_outputs needs the package xgrammar.*pip install 'hispec\[structured\]'"
    ):
        llm.generate(["Hello", "there"], [SamplingParams(), wanted])
    assert not llm.engine.has_unfinished


def test_an_artifact_without_tokenizer_or_eos_can_not_end_such_a_text():
    wanted = StructuredOutputsParams(regex="a")
    with pytest.raises(ValueError, match="structured_outputs: this artifact has no tokenizer"):
        GrammarCompiler(NoTokenizer(), VOCAB_SIZE, [0]).compile(wanted)
    with pytest.raises(ValueError, match="structured_outputs: this model has no EOS token"):
        GrammarCompiler(make_tokenizer(), VOCAB_SIZE, []).compile(wanted)


def test_xgrammar_is_imported_only_when_a_grammar_is_asked_for():
    program = "import sys; from infer import LLM, StructuredOutputsParams as S; S(regex='a'); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert "infer.grammar" in result.stdout.split() and "xgrammar" not in result.stdout.split(), result.stderr


# ---- through the front door ----


def test_generate_and_stream_keep_to_a_schema(llm):
    wanted = StructuredOutputsParams(json=COLORS, disable_any_whitespace=True)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, structured_outputs=wanted)
    outputs = llm.generate(["Hello, world!", "A"], params)
    for output in outputs:
        assert json.loads(output.outputs[0].text)["color"] in ("red", "blue")
        assert output.outputs[0].finish_reason == "stop"
    assert list(llm.stream("A", params))[-1].outputs == outputs[1].outputs


def test_a_bad_form_stops_the_whole_call_before_any_work(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("work has begun"))
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a"))
    with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
        llm.generate(["Hello", "there"], [SamplingParams(), bad])


def test_the_terminal_has_an_option_for_each_form(llm, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "infer.commands.options.load_llm", lambda args, strategy, verification: llm.use(strategy) or llm
    )
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text(json.dumps(COLORS))
    grammar.write_text('root ::= "ab" | "ba"')
    command = ["generate", "artifact", "--raw", "--prompt", "Hello", "--max-tokens", "8", "--strategy", "hispec"]
    for options, expected in [
        (["--regex", "[a-c]{3}"], "[a-c]{3}"),
        (["--choice", "yes", "--choice", "no", "--check"], "yes|no"),
        (["--grammar", str(grammar)], "ab|ba"),
        (["--json-schema", str(schema)], r"\{.*"),
        (["--json-object"], r"\{.*"),
    ]:
        assert main([*command, *options]) == 0
        assert re.fullmatch(expected, capsys.readouterr().out.rstrip("\n"), re.DOTALL), options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "[a"], "structured_outputs.regex='[a'"),
        (["--json-schema", "nowhere.json"], "--json-schema nowhere.json can't be read"),
        (["--choice", "yes", "--regex", "a"], "not allowed with argument"),
    ],
)
def test_the_terminal_says_in_one_line_what_is_wrong(llm, capsys, monkeypatch, options, message):
    monkeypatch.setattr("infer.commands.options.load_llm", lambda args, strategy, verification: llm)
    try:
        code = main(["generate", "artifact", "--prompt", "Hello", *options])
    except SystemExit as error:  # argparse
        code = error.code
    captured = capsys.readouterr()
    assert code == 2 and message in captured.err and not captured.out

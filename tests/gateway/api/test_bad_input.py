"""Bodies that no route takes: the right status and code, nothing saved, the gateway well afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.api.bodies import ANSWERS, MESSAGES, ROUTES, Route, name
from tests.gateway.api.refusal import ECHO, nothing_saved, refused
from tests.gateway.served import Served, served


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("bad")) as running:
        running.session(id="base")
        running.turn("base", "hello")
        yield running


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_the_body_that_the_tables_vary_is_taken(gateway: Served, route: Route) -> None:
    assert route.send(gateway, route.with_fields()).status_code == route.ok


BODIES: dict[str, tuple[int, str]] = {  # more fields, in JSON
    '"x":NaN': (400, "invalid_json"),
    '"x":Infinity': (400, "invalid_json"),
    '"x":-Infinity': (400, "invalid_json"),
    '"x":1e999': (400, "invalid_json"),
    f'"x":1{"0" * 5000}': (400, "invalid_json"),
    f'"x":{"[" * 60_000}{"]" * 60_000}': (400, "invalid_json"),
    f'"x":{"[" * 900}{"]" * 900}': (400, "invalid_json"),
    '"x":' + '{"a":' * 900 + "1" + "}" * 900: (400, "invalid_json"),
    '"x":[' + "[]," * 250_000 + "0]": (400, "invalid_json"),
    '"x":"\\ud800"': (400, "invalid_unicode"),
    '"x":"\\udc00\\ud800"': (400, "invalid_unicode"),
    '"\\udfff":1': (400, "invalid_unicode"),
    '"x":{"y":["\\ud83d"]}': (400, "invalid_unicode"),
    '"x":"a\\u0000b"': (400, "invalid_unicode"),
    '"a\\u0000":1': (400, "invalid_unicode"),
    '"x":': (400, "invalid_json"),
    '"x":1}}': (400, "invalid_json"),
    "'x':1": (400, "invalid_json"),
    '"x":0x10': (400, "invalid_json"),
}


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_json_that_is_none_or_too_much_is_refused(gateway: Served, route: Route) -> None:
    with nothing_saved(gateway):
        for fields, (status, code) in BODIES.items():
            refused(route.send(gateway, route.with_fields(fields)), status, code)


def test_what_cannot_be_stored_is_named_by_its_path(gateway: Served) -> None:
    route = ROUTES[0]
    deep = route.with_text('[{"type":"text","text":"a\\ud800"}]')
    refused(route.send(gateway, deep), 400, "invalid_unicode", "messages[0].content[0].text")
    refused(route.send(gateway, route.with_text('"\\u0000"')), 400, "invalid_unicode", "messages[0].content")
    raw = route.with_fields().encode().replace(b'"hi"', b'"\xff\xfe"')
    assert f"byte {raw.index(0xFF)}" in refused(route.send(gateway, raw), 400, "invalid_unicode")["message"]


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_bytes_that_are_no_json_in_utf_8_are_refused(gateway: Served, route: Route) -> None:
    body = route.with_fields()
    with nothing_saved(gateway):
        for encoding in ("utf-16", "utf-16-le", "utf-32"):
            answer = route.send(
                gateway, body.encode(encoding), {"content-type": f"application/json; charset={encoding}"}
            )
            refused(answer, 415, "unsupported_media_type")
        refused(route.send(gateway, body.encode("utf-16")), 415, "unsupported_media_type")
        refused(route.send(gateway, body.encode("utf-8-sig")), 400, "invalid_json")
        refused(route.send(gateway, body.encode().replace(b"hi", b"\xc3\x28")), 400, "invalid_unicode")
        refused(route.send(gateway, body.encode().replace(b"hi", b"\xed\xa0\x80")), 400, "invalid_unicode")
        for whole in (b"[]", b"null", b'"x"', b"5", b"{", b"\x00", b"\x80" * 10):
            refused(route.send(gateway, whole), 400)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            refused(route.send(gateway, body, {"content-type": kind}), 415, "unsupported_media_type")
        for encoding in ("gzip", "br", "deflate, gzip"):
            refused(route.send(gateway, body, {"content-encoding": encoding}), 415, "unsupported_media_type")


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_unknown_fields_are_refused_by_name_but_on_openai_routes(gateway: Served, route: Route) -> None:
    sent = f'"not_a_field":"{ECHO}"'
    if route.strict:
        with nothing_saved(gateway):
            refused(route.send(gateway, route.with_fields(sent)), 400, "unknown_field", "not_a_field")
            for name in ("tenant_id", "pinned_replica", "version"):
                refused(route.send(gateway, route.with_fields(f'"{name}":1')), 400, "unknown_field", name)
    else:
        assert route.send(gateway, route.with_fields(sent)).status_code == route.ok


def test_of_duplicate_keys_the_last_is_checked_and_stored(gateway: Served) -> None:
    create = ROUTES[1]
    made = create.send(gateway, '{"title":"one","title":"two"}').json()
    assert gateway.client.get(f"/v1/sessions/{made['id']}").json()["title"] == "two"
    with nothing_saved(gateway):
        refused(create.send(gateway, '{"title":"one","title":5}'), 400, "invalid_value", "title")


NO_NUMBER = ("NaN", "1e999", "-1e999", "true", '"5"', "[]", "{}", f"1{'0' * 5000}")
NUMBERS = {  # field of an answer -> what it may not be
    "temperature": ("-0.1", "2.1", "-1e308"),
    "top_p": ("0", "-1", "1.1"),
    "top_k": ("-2", "1000001", "0.5"),
    "min_p": ("-0.1", "1.1"),
    "seed": ("9223372036854775808", "-9223372036854775809", "0.5", "1e30"),
    "presence_penalty": ("2.1", "-2.1"),
    "frequency_penalty": ("2.1", "-2.1"),
    "repetition_penalty": ("0", "-1", "10.1"),
    "top_logprobs": ("-1", "21", "999", "0.5"),
}
TOKENS = ("0", "-1", "1.5", "10000001", "1e30")


@pytest.mark.parametrize("route", ANSWERS, ids=name)
def test_a_number_out_of_its_bounds_is_refused_by_name(gateway: Served, route: Route) -> None:
    limits = ("max_tokens", "max_completion_tokens") if route.name == "chat" else ("max_output_tokens",)
    fields = NUMBERS | dict.fromkeys(limits, TOKENS) | ({"n": ("0", "2", "1000", "-1")} if route.name == "chat" else {})
    with nothing_saved(gateway):
        for field, wrong in fields.items():
            for value in wrong + NO_NUMBER:
                error = refused(route.send(gateway, route.with_fields(f'"{field}":{value}')), 400)
                assert error["param"] == field or error["code"] == "invalid_json", (field, value, error)


def test_the_numbers_of_a_session_are_bounded_too(gateway: Served) -> None:
    fields = {"ttl_seconds": ("0", "-1", "1.5", "315360001"), "policy.trigger_ratio": ("0", "1", "-1", "2")}
    fields |= {"policy.max_output_tokens": TOKENS}
    with nothing_saved(gateway):
        for route, (field, wrong) in itertools.product(
            [r for r in ROUTES if r.name in ("create", "patch")], fields.items()
        ):
            for value in wrong + NO_NUMBER:
                outer, _, inner = field.partition(".")
                sent = f'"{outer}":{{"{inner}":{value}}}' if inner else f'"{field}":{value}'
                error = refused(route.send(gateway, route.with_fields(sent)), 400)
                assert error["param"] == field or error["code"] == "invalid_json", (field, value, error)


SCHEMA = "response_format.json_schema.schema"
SHAPES = {  # more fields of an answer -> param
    '"stop":""': "stop",
    '"stop":[""]': "stop[0]",
    '"stop":0': "stop",
    f'"stop":{["a"] * 17}'.replace("'", '"'): "stop",
    f'"stop":{["a"] * 10_000}'.replace("'", '"'): "stop",
    f'"stop":["{"x" * 257}"]': "stop[0]",
    '"stop":[null]': "stop[0]",
    '"logprobs":5': "logprobs",
    '"top_logprobs":2': "top_logprobs",
    '"logit_bias":{"x":1}': "logit_bias.x",
    '"logit_bias":{"1":101}': "logit_bias.1",
    '"stream":"yes"': "stream",
    '"response_format":"json"': "response_format",
    '"response_format":{"type":"xml"}': "response_format.type",
    '"response_format":{"type":"json_schema"}': "response_format",
    '"response_format":{"type":"json_schema","json_schema":{"name":"x"}}': SCHEMA,
    '"response_format":{"type":"json_schema","json_schema":{"schema":{"$ref":"#"}}}': SCHEMA,
    '"response_format":{"type":"json_schema","json_schema":{"schema":'
    '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}}}': SCHEMA,
    '"response_format":{"type":"json_schema","json_schema":{"schema":'
    '{"$ref":"https://example.org/schema.json"}}}': SCHEMA,
    '"response_format":{"type":"json_schema","json_schema":{"schema":'
    f'{{"description":"{"x" * 1_000_000}"}}}}}}': "response_format.json_schema",
    '"tool_choice":"required"': "tool_choice",
    '"tool_choice":{"type":"function","function":{"name":"f"}}': "tool_choice",
    '"reasoning_effort":"much"': "reasoning_effort",
    '"chat_template_kwargs":{"chat_template":"{{ 1 }}"}': "chat_template_kwargs.chat_template",
    '"chat_template_kwargs":{"messages":"x"}': "chat_template_kwargs.messages",
    '"chat_template_kwargs":{"x":{}}': "chat_template_kwargs.x",
    '"on_disconnect":"explode"': "on_disconnect",
}


@pytest.mark.parametrize("route", ANSWERS, ids=name)
def test_the_shape_of_an_answer_has_bounds(gateway: Served, route: Route) -> None:
    with nothing_saved(gateway):
        for fields, param in SHAPES.items():
            refused(route.send(gateway, route.with_fields(fields)), 400, param=param)


def tool(parameters: str, name: str = "f") -> str:
    return f'{{"type":"function","function":{{"name":"{name}","parameters":{parameters}}}}}'


TOOLS = {
    '"tools":{}': "tools",
    '"tools":[{}]': "tools[0].type",
    f'"tools":[{tool("{}", "a b")}]': "tools[0].function.name",
    f'"tools":[{tool("{}")},{tool("{}")}]': "tools",
    f'"tools":[{",".join(tool("{}", f"f{i}") for i in range(129))}]': "tools",
    f'"tools":[{tool("5")}]': "tools[0].function.parameters",
    '"tools":[' + tool('{"$ref":"#"}') + "]": "tools[0].function.parameters",
    '"tools":[' + tool('{"properties":{"a":{"$ref":"#/nowhere"}}}') + "]": "tools[0].function.parameters",
    '"tools":[' + tool(f'{{"description":"{"x" * 1_000_000}"}}') + "]": "tools",
}


@pytest.mark.parametrize("route", [r for r in ROUTES if r.name in ("chat", "create", "patch", "import")], ids=name)
def test_tools_have_bounds(gateway: Served, route: Route) -> None:
    with nothing_saved(gateway):
        for fields, param in TOOLS.items():
            refused(route.send(gateway, route.with_fields(fields)), 400, param=param)


def test_a_schema_may_contain_itself(gateway: Served) -> None:
    tree = '{"type":"object","properties":{"children":{"type":"array","items":{"$ref":"#"}}}}'
    assert ROUTES[1].send(gateway, ROUTES[1].with_fields(f'"tools":[{tool(tree)}]')).status_code == 201


@pytest.mark.parametrize("route", MESSAGES, ids=name)
def test_a_prompt_over_the_window_is_refused_with_the_numbers(gateway: Served, route: Route) -> None:
    with nothing_saved(gateway):
        error = refused(route.send(gateway, route.with_text(f'"{"w" * 140_000}"')), 400, "context_length_exceeded")
    assert error["param"] == route.field
    assert error["details"]["limit"] == 131_072
    assert error["details"]["requested"] > 140_000


def test_what_the_engine_refuses_leaves_no_trace(gateway: Served) -> None:
    key = {"x-session-id": "never"}
    body = '{"model":"echo","messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_object"}STREAM}'
    for stream in ("", ',"stream":true'):
        with nothing_saved(gateway):
            sent = body.replace("STREAM", stream)
            refused(ROUTES[0].send(gateway, sent, key), 400, "unsupported_parameter", "response_format")
            refused(gateway.client.get("/v1/sessions/never"), 404, "session_not_found")
            asked = '{"input":"x","response_format":{"type":"json_object"}STREAM}'.replace("STREAM", stream)
            refused(ROUTES[3].send(gateway, asked), 400, "unsupported_parameter", "response_format")


def test_a_model_that_is_not_served(gateway: Served, tmp_path: Path) -> None:
    nope = ECHO[:250]
    chat = f'{{"model":"{nope}","messages":[{{"role":"user","content":"a"}}]}}'
    with nothing_saved(gateway):
        refused(ROUTES[0].send(gateway, chat), 404, "model_not_found", "model")
        refused(ROUTES[1].send(gateway, f'{{"model":"{nope}"}}'), 404, "model_not_found", "model")
        refused(ROUTES[2].send(gateway, f'{{"model":"{nope}"}}'), 404, "model_not_found", "model")
    with served(tmp_path, engines={}) as alone:
        assert int(ROUTES[0].send(alone, ROUTES[0].with_fields()).headers["retry-after"]) >= 1
        refused(ROUTES[0].send(alone, ROUTES[0].with_fields()), 503, "no_replica")

"""The API against its own description: whatever the schema allows, or does not, gets an answer that it names."""

from __future__ import annotations

import subprocess
import sys

from servers import EAGER, running

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LIMITS = ["--max-model-len", "32", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(1 << 21), "--device", "cpu"]


def test_schemathesis_finds_no_answer_that_the_schema_does_not_name(tmp_path):
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    with running(*EAGER, limits=LIMITS) as server:
        url = f"{server.url}/openapi.json"
        options = f"--checks {CHECKS} --phases coverage,fuzzing --max-examples 3 --generation-deterministic --no-color"
        command = [sys.executable, "-c", program, "run", url, *options.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout
        paths = server.get("/openapi.json")["paths"]
        assert f"Tested: {sum(map(len, paths.values()))}" in done.stdout
        server.assert_all_free()
        assert server.is_healthy()


def test_the_schema_names_errors_as_they_are():
    from draftloop.config import EngineConfig
    from draftloop.server.app import make_app
    from draftloop.server.client import EngineClient
    from draftloop.server.options import ServerOptions

    client = EngineClient(EngineConfig(model="m"), max_waiting=1, silence_s=1)
    schema = make_app(client, ServerOptions()).openapi()
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    operations = [one for path in schema["paths"].values() for one in path.values()]
    assert all({"200", "400", "401", "404", "413", "429", "503"} <= one["responses"].keys() for one in operations)
    assert not any("422" in one["responses"] for one in operations)
    content = schema["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert {"application/json", "text/event-stream"} <= content.keys()

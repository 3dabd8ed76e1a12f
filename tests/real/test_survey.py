"""What `rlsched engines` says: who is installed, and what each can do by its own word."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from rlsched.cli import main
from rlsched.errors import InputError
from rlsched.real.config import EngineConfig
from rlsched.real.engines import Capabilities
from rlsched.real.setup import load
from rlsched.real.survey import capabilities

pytestmark = pytest.mark.real


def test_the_embedded_engine_says_what_it_can_do() -> None:
    able = asyncio.run(capabilities("transformers", EngineConfig(kv_blocks=32, page_size=16)))
    assert (able.engine, able.kv_tokens, able.sleep_frees) == ("transformers", 512, ("weights", "kv"))
    assert able == msgspec.convert(msgspec.to_builtins(able), Capabilities)


def test_an_engine_that_can_not_start_is_one_clear_line() -> None:
    with pytest.raises(InputError, match=r"^engine transformers doesn't start: transformers \(pid \d+\) died: [^\n]+$"):
        asyncio.run(capabilities("transformers", EngineConfig(page_size=-1)))


def test_a_quick_look_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["engines", "--quick", "--json"])
    assert ended.value.code == 0
    told = msgspec.json.decode(capsys.readouterr().out)
    assert told["engines"][0]["name"] == "transformers"
    assert told["engines"][0]["ok"]
    assert told["capabilities"] == {}


def test_a_job_names_its_engine_and_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text('engine_kind = "sglang"\ninterpreter = "/no/python"\n')
    with pytest.raises(SystemExit) as ended:
        main(["run", "areal-async", "--config", str(job)])
    assert ended.value.code == 2
    assert "engine sglang: no /no/python: make engines" in capsys.readouterr().err
    assert load(job, engine="vllm").engine_kind == "vllm"
    job.write_text('[engine]\ndevice = "mps"\n')
    with pytest.raises(InputError, match=r"job.toml: engine.device is 'mps': it must be cpu, cuda or cuda:N"):
        load(job)
    job.write_text('interpreter = "/no/python"\n')
    assert load(job).interpreter == "/no/python"

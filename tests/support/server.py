"""`vllm serve` as a child process on loopback, a client for it, and a subscriber to its KV events. Needs vLLM."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
import zmq
from recording import RECORD
from vllm.distributed.kv_events import KVEventBatch

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EventSubscriber", "Server", "ServerStateError"]

SUPPORT = Path(__file__).resolve().parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The worker runs in the engine core's process, as it does on one GPU, which starts sooner. The engine core keeps a
    # process of its own in any case.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}
ARGUMENTS = [
    "--host=127.0.0.1",
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--enforce-eager",
    "--seed=1",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=256",
    "--block-size=32",
    "--scheduler-cls=recording.RecordingScheduler",
    "--no-async-scheduling",
    "--enable-prompt-tokens-details",
    "--served-model-name=tiny",
]
START = 180
"""Seconds until a server has to be ready; on a busy machine with two cores it takes up to a minute."""
ANSWER = 120
STOP = 20


class ServerStateError(Exception):
    """The server has not done in time what was waited for."""


class Server:
    """A server with a tiny model of dummy weights. Ends with its whole process group when the context ends."""

    def __init__(
        self, folder: Path, mode: str, model: dict[str, Any], arguments: list[str], environment: dict[str, str]
    ) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        self._record = folder / "record.jsonl"
        self._out, self._err = folder / "stdout.txt", folder / "stderr.txt"
        self._port = free_port()
        path = [str(SUPPORT), *_metadata(folder), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            "LOCKSTEP_KV": mode,
            RECORD: str(self._record),
            "PYTHONPATH": os.pathsep.join(path),
            **environment,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
        self._command = [*command, f"--port={self._port}", *ARGUMENTS, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._out.open("wb") as out, self._err.open("wb") as err:
            # A session of its own, so that its group is it and all that it starts.
            self._process = subprocess.Popen(  # noqa: S603
                self._command, env=self._environment, stdout=out, stderr=err, start_new_session=True
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        # It is asked first, so that it can tell its workers and remove its shared memory.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP)

    @property
    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="replace")

    @property
    def log(self) -> str:
        return self._out.read_text(encoding="utf-8", errors="replace") + self.stderr

    def wait_ended(self) -> int:
        """The exit status of a server that is expected not to start."""
        if self._ready_before_end():
            raise ServerStateError(f"the server is ready, but should have ended:\n{self.log[-8000:]}")
        assert self._process is not None
        return self._process.wait(0)

    def wait_ready(self) -> None:
        """Return when the server takes requests."""
        if not self._ready_before_end():
            raise ServerStateError(f"the server ended before it was ready:\n{self.log[-8000:]}")

    def _ready_before_end(self) -> bool:
        """Wait until the server takes requests or has ended."""
        assert self._process is not None
        until = time.monotonic() + START
        while time.monotonic() < until:
            if self._process.poll() is not None:
                return False
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health", timeout=5)[0] == http.HTTPStatus.OK:
                    return True
            time.sleep(0.25)
        raise ServerStateError(f"the server neither ends nor is ready:\n{self.log[-8000:]}")

    def complete(self, prompt: list[int], *, rank: int | None = None, **more: Any) -> dict[str, Any]:
        """Ask for a greedy completion. Returns its tokens, why it ended, and its usage. rank: of which engine."""
        status, answer = self._ask("POST", "/v1/completions", self._body(prompt, more), self._headers(rank))
        assert status == http.HTTPStatus.OK, answer
        found = json.loads(answer)
        (choice,) = found["choices"]
        usage = {key: value for key, value in found["usage"].items() if value is not None}
        return {"tokens": choice["token_ids"], "finish_reason": choice["finish_reason"], "usage": usage}

    def usage_while_streaming(self, prompt: list[int], **more: Any) -> tuple[list[int], float]:
        """Stream a completion. Returns its tokens and the first KV cache usage above zero read meanwhile."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER)
        with contextlib.closing(connection):
            body = json.dumps(self._body(prompt, more | {"stream": True}))
            connection.request("POST", "/v1/completions", body, self._headers(None))
            response = connection.getresponse()
            assert response.status == http.HTTPStatus.OK, response.read()
            tokens: list[int] = []
            usage = 0.0
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if data in ("", "[DONE]"):
                    continue
                tokens += json.loads(data)["choices"][0]["token_ids"] or []
                if not usage:
                    usage = sum(self.metrics(["vllm:kv_cache_usage_perc"]).values())
        return tokens, usage

    def reset_prefix_cache(self) -> bool:
        """Reset; needs VLLM_SERVER_DEV_MODE. The blocks of a request are free only some time after its answer."""
        for _ in range(50):
            status, answer = self._ask("POST", "/reset_prefix_cache")
            assert status == http.HTTPStatus.OK, answer
            if json.loads(answer)["success"]:
                return True
            time.sleep(0.1)
        return False

    def metrics(self, names: list[str]) -> dict[str, float]:
        """The series of these names, with their labels, now."""
        status, answer = self._ask("GET", "/metrics")
        assert status == http.HTTPStatus.OK, answer
        found = {}
        for line in answer.decode().splitlines():
            name = re.match(r"[\w:]+", line)
            if name and name[0] in names:
                series, value = line.rsplit(" ", 1)
                found[series] = float(value)
        return found

    def metrics_at_rest(self, names: list[str]) -> dict[str, float]:
        """The metrics once no blocks are in use: the last step is reported some time after the last answer."""
        until = time.monotonic() + 10
        while any(self.metrics(["vllm:kv_cache_usage_perc"]).values()):
            assert time.monotonic() < until, "blocks stay in use"
            time.sleep(0.1)
        return self.metrics(names)

    def steps(self) -> list[dict[str, Any]]:
        """What the schedulers have recorded so far, without steps that ran nothing: those depend on time."""
        lines = self._record.read_text(encoding="utf-8").splitlines()
        steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [step for step in steps if step["scheduled"]]

    def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = ANSWER,
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers or {})
            response = connection.getresponse()
            return response.status, response.read()

    @staticmethod
    def _body(prompt: list[int], more: dict[str, Any]) -> dict[str, Any]:
        return {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}

    @staticmethod
    def _headers(rank: int | None) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers if rank is None else {**headers, "X-data-parallel-rank": str(rank)}


class EventSubscriber:
    """Receives what an engine publishes. It is the side that binds, so that it is there before the engine."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._received: queue.Queue[list[bytes]] = queue.Queue()
        self._ended = threading.Event()
        # A bound socket subscribes to a publisher only while somebody polls it: events would be lost until then.
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        while not self._ended.is_set():
            if self._socket.poll(100):
                self._received.put(self._socket.recv_multipart())

    def until_stored(self, tokens: list[int], seconds: float = 30) -> list[tuple[int, Any]]:
        """All events, each with the rank it is from, until blocks with these tokens are stored."""
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        found: list[tuple[int, Any]] = []
        for number in itertools.count():
            _, sequence, payload = self._received.get(timeout=seconds)
            assert int.from_bytes(sequence, "big") == number, "a batch was lost"
            batch = decoder.decode(payload)
            events = [msgspec.to_builtins(event) for event in batch.events]
            found += [(batch.data_parallel_rank, event) for event in events]
            if any(event.get("token_ids") == tokens for event in events):
                break
        return found


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _metadata(folder: Path) -> list[str]:
    """A folder to import from that says which version of vLLM this is, if nothing else does.

    `vllm serve` asks for the version of the package "vllm", and fails where only "vllm-cpu" is installed.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        installed = version("vllm-cpu") + "+cpu"
        made = folder / "metadata" / f"vllm-{installed}.dist-info"
        made.mkdir(parents=True)
        (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {installed}\n", encoding="utf-8")
        return [str(made.parent)]
    return []

"""All settings of the server. Each is an environment variable `LATHE_<NAME>`; command-line options take precedence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from lathe.server.access.crossorigin import validate_origins
from lathe.server.access.quotas import LEAST_RATE
from lathe.server.telemetry.access_log import Choice
from lathe.server.telemetry.logs import LogFormat

Device = Annotated[str, Field(pattern=r"^(cpu|(cuda|simulated|interpreted)(:[0-9]{1,3})?)$")]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FEW_CONNECTIONS = 16  # always allowed per client: browsers open 6 per host, client libraries a pool of 10


class Settings(BaseSettings):
    """The settings of one server process; sizes in bytes, times in seconds unless the name says otherwise."""

    model_config = SettingsConfigDict(env_prefix="LATHE_", frozen=True, extra="forbid")

    # addresses and folders
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for gRPC, which needs the extra `grpc`; 0 picks a free one. Unset: no gRPC.",
    )
    model_repo: Path = Field(Path("model_repo"), description="Folder of the model repository.")
    cache_dir: Path | None = Field(
        None,
        description="Folder for compiled artifacts. Unset: `.cache` inside the model repository; for commands without "
        "a server, such as `lathe compile`, `~/.cache/lathe`. `LATHE_CACHE` is an older name of this variable.",
    )
    state_dir: Path | None = Field(
        None, description="Folder for datasets and jobs. Unset: `.lathe` inside the model repository."
    )

    # access
    keys_file: Path | None = Field(
        None,
        description="File of API keys, which `lathe keys` writes. If set, calls need a key with their scope, except "
        "health checks, `GET /v2`, `/openapi.json` and `/docs`.",
    )
    jwt_keys: Path | None = Field(
        None,
        description="Public keys (JWKS file) of an identity provider whose tokens are accepted like API keys; needs "
        "the extra `jwt`.",
    )
    jwt_issuer: str = Field("", description="Required value of a token's `iss` claim. Unset: no token is accepted.")
    jwt_audience: str = Field("lathe", description="Required value in a token's `aud` claim.")
    open_management: bool = Field(
        False,
        description="Without API keys and tokens, let every client do everything, even on an address that other "
        "machines reach.",
    )
    tls_cert: Path | None = Field(None, description="Certificate chain (PEM). If set, HTTP and gRPC accept TLS only.")
    tls_key: Path | None = Field(
        None, description="The certificate's private key (PEM). Unset: the certificate's file contains it."
    )
    tls_client_ca: Path | None = Field(
        None, description="CA certificates (PEM). If set, clients need a certificate that one of these CAs signed."
    )

    shared_memory: bool | None = Field(
        None,
        description="Whether clients may pass tensors in shared memory of this machine (objects in /dev/shm). The "
        "server then reads and writes any object that its user may. Unset: yes on a loopback address without keys and "
        "tokens, otherwise no.",
    )

    # the engine
    device: Device = Field(
        "cpu",
        description="Device that models run on: `cpu`, or a GPU such as `cuda` or `cuda:1`. Operators without GPU "
        "kernels run on the CPU.",
    )
    threads: int | None = Field(
        None, ge=1, description="Threads of the compute thread pool. Unset: the CPUs that the process may use."
    )
    max_batch: int = Field(
        32,
        ge=1,
        le=4096,
        description="Largest batch that models are compiled for, unless their `config.toml` sets `compile.max_batch`.",
    )
    precision: Literal["float32", "bfloat16", "float16", "int8-activations"] = Field(
        "float32",
        description="Precision of the factors in matrix products and convolutions of float32: `float32`, `bfloat16` or "
        "`float16`; or `int8-activations`, for the factors of weights of few bits. Sums stay in float32.",
    )

    operators: str = Field(
        "",
        description="Python modules that register custom operators, separated by commas; imported by the server and by "
        "the processes that parse and compile uploads.",
    )
    max_memory: int | None = Field(
        None,
        ge=1 * MIB,
        description="Memory for all models together: for each its weights, the arena of its batches, its queue and its "
        "response cache. A model that would exceed it is not loaded (507). Unset: no limit.",
    )
    generation_cache: int = Field(
        512 * MIB,
        ge=1 * MIB,
        description="Memory for the keys and values of each language model in memory; it bounds how many texts are "
        "generated at once, and how long they are.",
    )

    # batching and admission
    workers: int = Field(
        2, ge=1, le=64, description="Threads that run batches, and so the most batches that they run at once."
    )
    inline_budget_us: int = Field(
        1000,
        ge=0,
        description="Batches that are expected to take at most this many microseconds may run on the event loop's "
        "thread, which saves two thread switches. 0: all batches run on workers.",
    )
    queue_items: int = Field(
        2048,
        ge=1,
        description="Requests that may wait or run per version. Beyond this limit a request gets 503: the new one, or "
        "the newest waiting one of the client that has most.",
    )
    queue_bytes: int = Field(
        256 * MIB,
        ge=1,
        description="Bytes of input that may wait or run per version. Beyond this limit, requests get status 503; a "
        "single larger request may enter an empty queue. Each element of a BYTES tensor counts as 56 bytes plus its "
        "text.",
    )

    client_rate: float | None = Field(
        None,
        ge=LEAST_RATE,
        description="Rate limit: rows per second of each client's inference requests; further requests get 429. A "
        "client is an API key, or an address if there are no keys. Unset: no limit.",
    )
    client_burst: float | None = Field(
        None,
        ge=1,
        description="Rows that a client may send at once under the rate limit. Unset: those of one second, at least "
        "one.",
    )
    client_token_rate: float | None = Field(
        None,
        ge=LEAST_RATE,
        description="Limit of language models' tokens per second of each client: prompts, generated texts, and texts "
        "for embeddings and rankings; further requests get 429. Unset: no limit.",
    )
    client_token_burst: float | None = Field(
        None,
        ge=1,
        description="Tokens that a client may use at once under this limit. Unset: those of one minute, at least one.",
    )

    # gRPC
    grpc_keepalive_time: float = Field(
        7200.0, gt=0, description="Idle time of a gRPC connection after which the server sends a keepalive ping."
    )
    grpc_keepalive_timeout: float = Field(
        20.0, gt=0, description="Time a client has to answer a keepalive ping before its connection is closed."
    )
    grpc_max_connection_age: float | None = Field(
        None,
        gt=0,
        description="Age at which a gRPC connection is closed, so that clients spread over servers. Unset: no limit.",
    )
    grpc_max_connection_age_grace: float = Field(
        60.0, gt=0, description="Time that running calls get on a connection that is closed for its age."
    )
    grpc_stream_idle: float = Field(
        3600.0, gt=0, description="Time after which a gRPC stream without requests and without pending answers ends."
    )

    # HTTP
    served_hosts: str = Field(
        "",
        description="Host names and addresses accepted in the Host header (without its port), separated by commas; "
        "others get 421; `*` accepts all. Unset: all; on a loopback address without keys and tokens, only loopback "
        "names.",
    )
    cors_origins: Annotated[str, AfterValidator(validate_origins)] = Field(
        "",
        description="Origins (`https://app.example.org`) whose pages may call the server from a browser (CORS), "
        "separated by commas; `*` allows all. Unset: only the server's own pages. Requests of other origins that "
        "change or run something are refused (403) if there are no keys.",
    )
    max_body: int = Field(64 * MIB, ge=1, description="Largest body of an inference request, and largest gRPC message.")
    max_json: int = Field(
        16 * MIB, ge=1, description="Largest JSON part of an inference request; tensors may also come as binary data."
    )
    max_inflated: int = Field(
        256 * MIB,
        ge=1,
        description="Largest size of a compressed request's body after decompression. The size is also limited to 100 "
        "times the bytes sent, or 1 MiB if that is more.",
    )
    max_receiving: int = Field(
        1 * GIB,
        ge=1 * MIB,
        description="Bytes of all inference and JSON requests that are being received, decompressed and decoded, with "
        "the tensors made of them; beyond this limit requests get 503. A gRPC message counts when it is complete. One "
        "client (a key, or an address if there are no keys) may use half of the limit.",
    )
    max_header: int = Field(
        32 * KIB, ge=1 * KIB, description="Largest size of the request line and headers together, or of gRPC metadata."
    )
    header_timeout: float = Field(
        10.0,
        gt=0,
        description="Time to receive a request's line and headers, from the first byte; the first request of a "
        "connection from its opening. Also the time of a TLS handshake.",
    )
    body_timeout: float = Field(60.0, gt=0, description="Time to receive the body of an inference or JSON request.")
    upload_timeout: float = Field(1800.0, gt=0, description="Time to receive the body of an upload.")
    min_receive_rate: float = Field(
        1 * KIB,
        gt=0,
        description="Least average bytes per second of a request body, not counting its first 20 seconds. For uploads, "
        "the first `LATHE_BODY_TIMEOUT` seconds do not count, and no pause may be longer than `LATHE_BODY_TIMEOUT`.",
    )
    min_send_rate: float = Field(
        16 * KIB,
        gt=0,
        description="Least average bytes per second at which a client reads an answer, not counting the first "
        "`LATHE_WRITE_TIMEOUT` seconds.",
    )
    write_timeout: float = Field(
        60.0, gt=0, description="Time that a client may pause in reading an answer before its connection is closed."
    )
    keep_alive: float = Field(75.0, gt=0, description="Time an idle connection is kept open.")
    max_connections: int = Field(
        8192,
        ge=1,
        description="Largest number of HTTP connections; also that of gRPC connections, and that of gRPC calls in "
        "progress. At the limit, an idle connection is closed. If none is idle, requests on a new HTTP connection get "
        "503, except health checks.",
    )
    max_client_connections: int | None = Field(
        None,
        ge=1,
        description="Largest number of HTTP connections of one client address (IPv6: one /64); also that of its gRPC "
        "connections, and that of gRPC calls in progress of one key or address. Unset: a quarter of "
        "`LATHE_MAX_CONNECTIONS`, at least 16. Clients behind a proxy share one address: use the value of "
        "`LATHE_MAX_CONNECTIONS` there.",
    )
    max_pipeline: int = Field(
        64,
        ge=1,
        description="Unanswered requests of an HTTP connection or a gRPC stream at which the server stops reading from "
        "it.",
    )
    compress_min: int = Field(
        4 * KIB,
        ge=0,
        description="Smallest answer to an inference request that is compressed, if the client accepts that. Smaller "
        "ones are compressed if the client lists a single coding.",
    )
    strict_readiness: bool = Field(
        True,
        description="Not ready (503) while a live version is not in memory, unless it is being loaded and another "
        "version answers meanwhile. False: not ready only until the server has tried to load each live version once.",
    )
    drain_timeout: float = Field(
        20.0, gt=0, description="Time that accepted requests get to finish after SIGTERM or Ctrl-C."
    )
    otlp_endpoint: str | None = Field(
        None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP) for traces; needs the extra `otel`.",
    )
    trace_share: float = Field(
        0.01, ge=0, le=1, description="Share of the requests without a `traceparent` header that are traced."
    )
    log_format: LogFormat = Field(
        "auto",
        description="Format of the log on stderr: `json`, one object per line; `text`; `auto`, text on a terminal and "
        "otherwise JSON.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Lowest level that is logged: `debug`, `info`, `warning`, `error`. Request lines need `info` or "
        "`debug`.",
    )
    access_log: Choice = Field(
        "errors", description="Requests that are logged: `off`, `errors` (status 400 and above), `all`."
    )
    access_log_share: float = Field(
        1.0, gt=0, le=1, description="Share of the successful requests that are logged if `LATHE_ACCESS_LOG` is `all`."
    )
    access_log_rate: float = Field(
        100.0,
        ge=1,
        description="Most log lines per second for requests; the next line has the number of omitted ones.",
    )

    # disk
    min_free_disk: int = Field(
        256 * MIB,
        ge=0,
        description="Bytes kept free on the disk of models, and on that of datasets and jobs. While less is free, "
        "uploads and new jobs that would fill that disk are refused (507).",
    )

    # datasets and jobs
    max_dataset: int = Field(4 * GIB, ge=1, description="Largest dataset that may be uploaded.")
    max_datasets: int = Field(
        64 * GIB, ge=0, description="Largest size of all datasets together, including unfinished uploads."
    )

    job_slots: int = Field(1, ge=1, le=64, description="Most jobs that run at once.")
    job_device_slots: int = Field(1, ge=1, le=64, description="Most jobs that run at once on each GPU.")
    job_idle: bool = Field(
        True, description="Run jobs only on idle CPUs. False: jobs get a small share of the CPUs in any case."
    )
    job_threads: int | None = Field(
        None, ge=1, description="Threads of each job. Unset: the CPUs that the process may use."
    )
    max_jobs: int = Field(64, ge=1, description="Most jobs of one owner that have not ended.")
    max_job_seconds: float = Field(86_400.0, gt=0, description="Longest run time of a job, all attempts together.")
    max_job_memory: int = Field(8 * GIB, ge=64 * MIB, description="Largest resident memory of a job.")
    max_job_files: int = Field(8 * GIB, ge=1 * MIB, description="Largest size of a job's files.")
    max_jobs_files: int = Field(
        64 * GIB, ge=1 * MIB, description="Size of all jobs' files together, beyond which new jobs are refused."
    )
    keep_jobs: int = Field(
        200,
        ge=0,
        description="Ended jobs that are kept. When a job is submitted, older ones are deleted with their files.",
    )

    # repository
    poll_interval: float = Field(
        1.0, gt=0, description="Time between two checks of the repository, and of the files of keys, for changes."
    )
    settle_time: float = Field(
        2.0, ge=0, description="Time a hand-copied version must stay unchanged before a running server imports it."
    )
    max_upload: int = Field(
        4 * GIB, ge=1, description="Largest upload of a version: a model file, or an archive with its other files."
    )
    max_staging: int = Field(
        16 * GIB,
        ge=1,
        description="Largest size of all unfinished model uploads together; beyond this, uploads are refused (507). "
        "The simultaneous uploads of one client may use half of it (429).",
    )
    keep_versions: int = Field(
        16,
        ge=1,
        description="Old versions kept per model, in addition to those that are needed: by an alias or one rollback, a "
        "canary, a pipeline or `version_policy.specific`.",
    )
    max_cache: int = Field(
        16 * GIB,
        ge=0,
        description="Size of all compiled models beyond which the least recently used ones are deleted, except those "
        "in memory.",
    )
    auto_promote: bool = Field(
        False,
        description="Make uploads live at once, even without promote=true; also results of jobs that no gate refuses.",
    )
    child_timeout: float = Field(
        600.0,
        gt=0,
        description="Most CPU time of a child process that parses or compiles a model, or checks the inputs of a job. "
        "Its wall-clock time may be ten times that.",
    )
    child_memory: int = Field(
        8 * GIB, ge=64 * MIB, description="Largest resident memory of a child process that parses or compiles."
    )
    child_processes: int = Field(
        2,
        ge=1,
        description="Most child processes that parse or compile at once. If above 1, the uploads of one client "
        "never use all of them.",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Settings:
        if self.tls_cert is None and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key and tls_client_ca: expected tls_cert with them, without it there is no TLS")
        return self

    @property
    def connections_per_client(self) -> int:
        """The largest number of connections of one client address."""
        return min(self.max_connections, self.max_client_connections or max(FEW_CONNECTIONS, self.max_connections // 4))

    @property
    def cache_folder(self) -> Path:
        """The folder of compiled artifacts: `cache_dir`, by default `.cache` in the model repository."""
        return self.cache_dir if self.cache_dir is not None else self.model_repo / ".cache"

    @property
    def state_folder(self) -> Path:
        """The folder of datasets and jobs: `state_dir`, by default `.lathe` in the model repository."""
        return self.state_dir if self.state_dir is not None else self.model_repo / ".lathe"

"""Every knob of the server. Each may be set as ``LATHE_<NAME>`` in the environment; command-line flags win."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from server.access.crossorigin import checked_origins
from server.telemetry.access import Choice
from server.telemetry.logs import Form

Device = Annotated[str, Field(pattern=r"^(cpu|(cuda|simulated|interpreted)(:[0-9]{1,3})?)$")]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FEW_CONNECTIONS = 16  # that one client may have in any case: browsers open 6 per host, client libraries a pool of 10


class Settings(BaseSettings):
    """Settings of one server process; sizes in bytes, times in seconds unless the name says otherwise."""

    model_config = SettingsConfigDict(env_prefix="LATHE_", frozen=True, extra="forbid")

    # where
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for gRPC, which the extra `grpc` brings; without it there is none; 0 picks a free one.",
    )
    model_repo: Path = Field(Path("model_repo"), description="The model repository's folder.")
    cache_dir: Path | None = Field(
        None,
        description="Folder for compiled artifacts; without it `.cache` inside the model repository. "
        "Commands without a server, such as `lathe compile`, keep theirs there, too; without it in `~/.cache/lathe`. "
        "`LATHE_CACHE` is an older name for it.",
    )
    state_dir: Path | None = Field(
        None, description="Folder for datasets and jobs; without it `.lathe` inside the model repository."
    )

    # access
    keys_file: Path | None = Field(
        None, description="File of API keys, as `lathe keys` writes it; with it every call needs one that allows it."
    )
    jwt_keys: Path | None = Field(
        None,
        description="Public keys (JWKS file) of an identity provider whose tokens are taken like keys; the extra `jwt` "
        "brings what reads them.",
    )
    jwt_issuer: str = Field("", description="What a token's `iss` must be.")
    jwt_audience: str = Field("lathe", description="What a token's `aud` must name.")
    open_management: bool = Field(
        False,
        description="Without a file of keys, let everybody manage models even on an address that other machines reach.",
    )
    tls_cert: Path | None = Field(None, description="Certificate chain (PEM); with it HTTP and gRPC are TLS only.")
    tls_key: Path | None = Field(
        None, description="The certificate's private key (PEM); without it the certificate's file holds it."
    )
    tls_client_ca: Path | None = Field(
        None, description="Certificates (PEM) that signed the clients'; with it a client without one is refused."
    )

    shared_memory: bool | None = Field(
        None,
        description="Whether clients may name shared memory of this machine (objects in /dev/shm) for tensors: the "
        "server reads and writes what its user may. Without it only on a loopback address without keys.",
    )

    # the engine
    device: Device = Field(
        "cpu",
        description="Where models run: `cpu`, or a GPU, `cuda`, `cuda:1`, for all that there are kernels for.",
    )
    threads: int | None = Field(
        None, ge=1, description="Threads of the compute team; without it what the process may use of the machine."
    )
    max_batch: int = Field(32, ge=1, le=4096, description="Largest batch a model is compiled for.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="What matrix products and convolutions multiply; they add up in float32 either way."
    )

    operators: str = Field(
        "",
        description="Python modules that register custom operators, with commas between them; the server imports "
        "them, and so do the processes that parse and compile uploads.",
    )
    max_memory: int | None = Field(
        None,
        ge=1 * MIB,
        description="Memory for all models together: the weights of each, what its batches compute in, its queue and "
        "its response cache. What would not fit is not loaded (507). Without it there is no bound.",
    )

    # batching and admission
    workers: int = Field(2, ge=1, le=64, description="Threads that run batches, so also how many models run at once.")
    inline_budget_us: int = Field(
        1000,
        ge=0,
        description="Batches expected to take at most this many microseconds run on the event loop's own thread, "
        "which saves two thread switches; 0 turns it off.",
    )
    queue_items: int = Field(2048, ge=1, description="Requests that may wait per version before 503.")
    queue_bytes: int = Field(
        256 * MIB,
        ge=1,
        description="Bytes of input that may wait per version before 503; each element of a BYTES tensor counts 56 "
        "besides its text.",
    )

    client_rate: float | None = Field(
        None,
        gt=0,
        description="Rows per second that each client may have inferred before 429; a client is a key, or an address "
        "where there are no keys.",
    )
    client_burst: float | None = Field(
        None, ge=1, description="Rows a client may have inferred at once; without it those of one second."
    )

    # gRPC
    grpc_keepalive_time: float = Field(
        7200.0, gt=0, description="Silence on a gRPC connection after which its client is asked whether it is there."
    )
    grpc_keepalive_timeout: float = Field(
        20.0, gt=0, description="Time a client has to answer that before its connection is closed."
    )
    grpc_max_connection_age: float | None = Field(
        None, gt=0, description="Age at which a gRPC connection is closed, so that clients spread; without it none is."
    )
    grpc_max_connection_age_grace: float = Field(
        60.0, gt=0, description="Time that calls on such a connection get to end."
    )
    grpc_stream_idle: float = Field(
        3600.0, gt=0, description="Time a gRPC stream may go without requests, and without answers due, before it ends."
    )

    # HTTP
    served_hosts: str = Field(
        "",
        description="Names and addresses that clients may call the server by (the Host header without its port), with "
        "commas between them; others get 421; `*`: any will do. Without it any will do, except on a loopback address "
        "without keys, where loopback names do.",
    )
    cors_origins: Annotated[str, AfterValidator(checked_origins)] = Field(
        "",
        description="Origins (`https://app.example.org`) whose pages a browser lets call the server (CORS), with "
        "commas between them; `*`: any page may. Without it none but the server's own. Without keys, others can "
        "change and run nothing (403).",
    )
    max_body: int = Field(64 * MIB, ge=1, description="Largest body of an inference or JSON request.")
    max_json: int = Field(
        16 * MIB, ge=1, description="Largest JSON part of an inference request; tensors may also come as binary data."
    )
    max_inflated: int = Field(
        256 * MIB,
        ge=1,
        description="Largest body once a compressed request is inflated, which may be a hundred times "
        "what was sent, or a mebibyte.",
    )
    max_receiving: int = Field(
        1 * GIB,
        ge=1 * MIB,
        description="Bytes of requests that are being received, inflated and read, and of what is made of them, all "
        "together; one client, a key or an address where there are no keys, may have half of them. Beyond it 503.",
    )
    max_header: int = Field(32 * KIB, ge=1 * KIB, description="Largest request line and headers together.")
    header_timeout: float = Field(10.0, gt=0, description="Time to receive a request's head, from its first byte.")
    body_timeout: float = Field(60.0, gt=0, description="Time to receive the body of an inference or JSON request.")
    upload_timeout: float = Field(1800.0, gt=0, description="Time to receive the body of an upload.")
    min_receive_rate: float = Field(
        1 * KIB,
        gt=0,
        description="Bytes per second that a body brings at least, on average after the first 20 seconds; an upload "
        "after a first `LATHE_BODY_TIMEOUT`, and it never pauses for longer than that.",
    )
    min_send_rate: float = Field(
        16 * KIB,
        gt=0,
        description="Bytes per second of an answer that a client reads at least, on average after a first "
        "`LATHE_WRITE_TIMEOUT`.",
    )
    write_timeout: float = Field(
        60.0, gt=0, description="Time a client may go without reading an answer before it is dropped."
    )
    keep_alive: float = Field(75.0, gt=0, description="Time an idle connection is kept.")
    max_connections: int = Field(
        8192,
        ge=1,
        description="Connections served at once, of HTTP and of gRPC each, and gRPC calls under way; beyond it the one "
        "that has been idle for longest makes room, or the new one gets 503 for all but health checks.",
    )
    max_client_connections: int | None = Field(
        None,
        ge=1,
        description="Connections served at once of one client address (of IPv6 its /64), of HTTP and of gRPC each, and "
        "gRPC calls under way of one client, a key or an address; without it a quarter of "
        "`LATHE_MAX_CONNECTIONS`, or 16 if that is more. All clients behind a proxy have one address: there give it as "
        "many as `LATHE_MAX_CONNECTIONS`.",
    )
    max_pipeline: int = Field(64, ge=1, description="Unanswered requests per connection before reading pauses.")
    compress_min: int = Field(
        4 * KIB, ge=0, description="Smallest answer that is compressed for a client that merely accepts it."
    )
    strict_readiness: bool = Field(
        True,
        description="Not ready (503) while a live version is not in memory; false: only until each was tried once at "
        "the start.",
    )
    drain_timeout: float = Field(20.0, gt=0, description="Time accepted requests get to finish after SIGTERM.")
    otlp_endpoint: str | None = Field(
        None,
        description="Address of an OpenTelemetry collector (OTLP over HTTP); the extra `otel` brings what it needs.",
    )
    trace_share: float = Field(
        0.01, ge=0, le=1, description="Share of the requests without a `traceparent` header whose traces are recorded."
    )
    log_format: Form = Field(
        "auto", description="Of the log, on stderr: `json`, one object per line; `text`; `auto`: text on a terminal."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least important lines that are logged."
    )
    access_log: Choice = Field(
        "errors", description="Which requests have a line in the log: `off`, `errors` (status 400 and more), `all`."
    )
    access_log_share: float = Field(
        1.0, gt=0, le=1, description="Of the requests that went well, with `all`: the share that has a line."
    )
    access_log_rate: float = Field(
        100.0, ge=1, description="Lines per second for requests at most; the next line says how many were left out."
    )

    # disk
    min_free_disk: int = Field(
        256 * MIB,
        ge=0,
        description="Bytes kept free on the disks of models, datasets and jobs: what would bring new files beyond that "
        "is refused (507), everything else goes on.",
    )

    # datasets and jobs
    max_dataset: int = Field(4 * GIB, ge=1, description="Largest dataset that may be uploaded.")
    max_datasets: int = Field(
        64 * GIB, ge=0, description="Size of all datasets together, those whose uploads are under way included."
    )

    job_slots: int = Field(1, ge=1, le=64, description="Jobs that run at once.")
    job_device_slots: int = Field(1, ge=1, le=64, description="Jobs that run at once on each GPU.")
    job_idle: bool = Field(
        True, description="Jobs compute only while nobody else wants the processors; false: they get a small share."
    )
    job_threads: int | None = Field(
        None, ge=1, description="Threads of each job; without it what the process may use of the machine."
    )
    max_jobs: int = Field(64, ge=1, description="Jobs of one owner that may wait or run.")
    max_job_seconds: float = Field(86_400.0, gt=0, description="Time one job may run, all attempts together.")
    max_job_memory: int = Field(8 * GIB, ge=64 * MIB, description="Memory one job may take.")
    max_job_files: int = Field(8 * GIB, ge=1 * MIB, description="Size of one job's files.")
    max_jobs_files: int = Field(
        64 * GIB, ge=1 * MIB, description="Size of all jobs' files together, beyond which no job is taken."
    )
    keep_jobs: int = Field(200, ge=0, description="Jobs that have ended and are kept with their files.")

    # repository
    poll_interval: float = Field(1.0, gt=0, description="How often the repository is looked at for changes.")
    settle_time: float = Field(2.0, ge=0, description="A hand-copied version is taken once unchanged for this long.")
    max_upload: int = Field(4 * GIB, ge=1, description="Largest model file that may be uploaded.")
    max_staging: int = Field(
        16 * GIB,
        ge=1,
        description="Size of all model files whose uploads are under way, beyond which one is refused (507); those of "
        "one client together may have half of it (429).",
    )
    keep_versions: int = Field(
        16, ge=1, description="Old versions kept per model beside those that aliases or their last step need."
    )
    max_cache: int = Field(16 * GIB, ge=0, description="Size of the cache of compiled artifacts.")
    auto_promote: bool = Field(False, description="Uploads go live at once even without promote=true.")
    child_timeout: float = Field(
        600.0,
        gt=0,
        description="Processor time one parsing or compiling child process may take; ten times as much by the clock.",
    )
    child_memory: int = Field(8 * GIB, ge=64 * MIB, description="Memory one child process may take.")
    child_processes: int = Field(
        2, ge=1, description="Child processes at work at once. Of several, one client's uploads never have all."
    )

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Settings:
        if self.tls_cert is None and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key and tls_client_ca: expected tls_cert with them, without it there is no TLS")
        return self

    @property
    def connections_each(self) -> int:
        """How many connections one client address may have."""
        return min(self.max_connections, self.max_client_connections or max(FEW_CONNECTIONS, self.max_connections // 4))

    @property
    def cache_folder(self) -> Path:
        """Where compiled artifacts are kept."""
        return self.cache_dir if self.cache_dir is not None else self.model_repo / ".cache"

    @property
    def state_folder(self) -> Path:
        """Where datasets and jobs are kept."""
        return self.state_dir if self.state_dir is not None else self.model_repo / ".lathe"

"""Builds the server's objects and connects them, once per process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Response
from prometheus_client.registry import Collector

from lathe.core.runtime.host.cpus import available_cpus
from lathe.server.access.authority import LOOPBACK, Authority, Mode
from lathe.server.access.crossorigin import origins_of
from lathe.server.access.quotas import Quota, Quotas
from lathe.server.api.connection.hub import Hub
from lathe.server.api.inference.asgi import HeadAsGet
from lathe.server.api.inference.body_reader import BodyReader
from lathe.server.api.inference.infer import InferService
from lathe.server.api.inference.request_log import LoggedInferService
from lathe.server.api.management.application import Application
from lathe.server.api.management.canary import canary_routes
from lathe.server.api.management.datasets import datasets_routes
from lathe.server.api.management.jobs import jobs_routes
from lathe.server.api.management.models import models_routes
from lathe.server.api.middleware.access_log import AccessLogging
from lathe.server.api.middleware.authorize import Authorize
from lathe.server.api.middleware.body_limits import BodyLimits
from lathe.server.api.middleware.cors import add_cors
from lathe.server.api.middleware.errors import install_error_handlers
from lathe.server.api.middleware.newline import TrailingNewline
from lathe.server.api.openai.routes import generate_routes, openai_routes
from lathe.server.api.v2.health import health_routes
from lathe.server.api.v2.model_info import VERSION
from lathe.server.api.v2.protocol_settings import LogSettings
from lathe.server.api.v2.repository import ProtocolControl
from lathe.server.api.v2.routes import RepositoryControl, v2_routes
from lathe.server.api.v2.shared_memory import shared_memory_routes
from lathe.server.backends.graph import GraphBackend
from lathe.server.backends.json_numbers import prepare_readers
from lathe.server.datasets.assembly import build_datasets
from lathe.server.datasets.service import Datasets
from lathe.server.generation.statistics import TextBook, TextMetrics
from lathe.server.jobs.assembly import Interfaces, Jobs, build_jobs
from lathe.server.jobs.evaluator import Evaluator
from lathe.server.jobs.metrics import JobMetrics
from lathe.server.jobs.parent_models import RepositoryParents
from lathe.server.jobs.publisher import Publisher
from lathe.server.repository.artifacts import writable_cache_folder
from lathe.server.repository.assembly import ControlPlane, build_control_plane
from lathe.server.repository.disk_space import model_space, state_space
from lathe.server.repository.memory_budget import MemoryMetrics
from lathe.server.repository.registry import Registry
from lathe.server.scheduling.pool import WorkerPool
from lathe.server.serving.dataplane import DataPlane, Resolver
from lathe.server.serving.servable import ServableFactory
from lathe.server.settings import Settings
from lathe.server.shared_memory import Regions
from lathe.server.telemetry.access_log import AccessLog
from lathe.server.telemetry.connections import ConnectionMetrics
from lathe.server.telemetry.disk_space import SpaceMetrics
from lathe.server.telemetry.gpus import GpuMetrics
from lathe.server.telemetry.metrics import CONTENT_TYPE, Metrics
from lathe.server.telemetry.statistics import StatsBook

if TYPE_CHECKING:
    from lathe.server.access.tokens import Tokens
    from lathe.server.api.grpc.endpoint import GrpcEndpoint
    from lathe.server.telemetry.tracing import Tracing

JobsMaker = Callable[[Settings, Interfaces, Callable[[], bool]], Jobs]
Running = Callable[[Callable[[], None]], AbstractAsyncContextManager[None]]  # takes a callback for "all is loaded"


@dataclass(frozen=True, slots=True)
class Engine:
    """The objects of the data path, which exist once per process."""

    settings: Settings
    pool: WorkerPool
    book: StatsBook
    factory: ServableFactory
    plane: DataPlane
    reading: BodyReader

    @classmethod
    def build(cls, settings: Settings, registry: Resolver) -> Engine:
        """Start the worker threads and build the data plane over the registry. The caller must close `pool`.

        Raises OSError or DamagedKeys if keys cannot be read, ModuleNotFoundError if an extra is not installed.
        """
        pool, book = WorkerPool(settings.workers), StatsBook()
        tokens, is_open = _tokens(settings), settings.open_management
        authority = Authority(settings.host, settings.keys_file, tokens=tokens, open_management=is_open)
        plane = DataPlane(registry, authority, _quotas(settings, authority), strict=settings.strict_readiness)
        plane.token_quotas = _token_quotas(settings, authority)
        plane.tracing = _tracing(settings)
        plane.regions = Regions(_allows_shared_memory(settings, authority), settings.max_body)
        return cls(settings, pool, book, ServableFactory(settings, pool, book), plane, BodyReader(settings, plane))


def _allows_shared_memory(settings: Settings, authority: Authority) -> bool:
    """Whether clients may register shared memory; by default only without keys on a loopback address."""
    if settings.shared_memory is not None:
        return settings.shared_memory
    return authority.mode is Mode.OPEN and settings.host in LOOPBACK


def _quotas(settings: Settings, authority: Authority) -> Quotas | None:
    rate = settings.client_rate
    if rate is None and settings.keys_file is None:
        return None
    return Quotas(None if rate is None else Quota.of(rate, settings.client_burst), authority.quota)


def _token_quotas(settings: Settings, authority: Authority) -> Quotas | None:
    rate = settings.client_token_rate
    if rate is None and settings.keys_file is None:
        return None
    quota = None if rate is None else Quota.of_tokens(rate, settings.client_token_burst)
    return Quotas(quota, authority.token_quota, "tokens")


def _tokens(settings: Settings) -> Tokens | None:
    if settings.jwt_keys is None:
        return None
    from lathe.server.access.tokens import Tokens  # imported here: pyjwt is installed by an extra

    return Tokens(settings.jwt_keys, settings.jwt_issuer, settings.jwt_audience)


def _tracing(settings: Settings) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    from lathe.server.telemetry.tracing import Tracing  # imported here: opentelemetry is installed by an extra

    return Tracing(settings.otlp_endpoint, settings.trace_share)


def create_app(settings: Settings) -> FastAPI:
    """Build all objects of a server from its settings, and return the ASGI application.

    Starts the worker threads; the application's lifespan ends them. Raises as `Engine.build`.
    """
    settings = settings.model_copy(update={"cache_dir": writable_cache_folder(settings.cache_folder)})
    prepare_readers(settings.cache_folder / "shared")
    registry = Registry()
    engine = Engine.build(settings, registry)
    control = build_control_plane(settings, registry, GraphBackend(settings.cache_folder / "shared"), engine.factory)
    return assemble_with(engine, control)


def assemble_with(
    engine: Engine, control: ControlPlane, datasets: Datasets | None = None, make_jobs: JobsMaker = build_jobs
) -> FastAPI:
    """Return the ASGI application with the routes of models, canaries, datasets and jobs.

    `datasets` and `make_jobs` are replaced in tests.
    """
    settings, rollout = engine.settings, control.rollout
    datasets = datasets or build_datasets(settings)
    parents = RepositoryParents(rollout.catalog, control.store)
    judge = Evaluator(datasets, parents, settings.job_threads or available_cpus(), settings.max_job_files)
    ports = Interfaces(datasets, parents, Publisher(rollout, judge))
    jobs = make_jobs(settings, ports, lambda: engine.plane.draining)
    datasets.needed_digests = jobs.service.datasets_needed
    engine.plane.missing_versions = control.readiness.missing_versions
    routers = [
        models_routes(rollout, settings.max_upload),
        canary_routes(rollout.trials, rollout.schedules),
        datasets_routes(datasets, settings.max_dataset),
        jobs_routes(jobs.service, jobs.followers),
    ]

    @asynccontextmanager
    async def running(loaded: Callable[[], None]) -> AsyncIterator[None]:
        async with control.running(loaded), datasets.running(), jobs.running():
            watching = [asyncio.create_task(space.watch(settings.poll_interval)) for space in spaces]
            yield
            for task in watching:
                task.cancel()

    spaces = [model_space(settings), state_space(settings)]
    engine.plane.alarms = lambda: [f"the disk of {space.name} is full" for space in spaces if space.is_full]
    metrics = [MemoryMetrics(control.memory), JobMetrics(jobs.register), GpuMetrics(), SpaceMetrics(spaces)]
    return assemble(engine, ProtocolControl(rollout), running, routers, metrics)


def assemble(
    engine: Engine,
    control: RepositoryControl,
    running: Running,
    routers: Iterable[APIRouter] = (),
    collectors: Iterable[Collector] = (),
) -> FastAPI:
    """Return the ASGI application with its middleware, the protocol's routes and `routers`.

    Its lifespan also starts and stops the gRPC endpoint, if the settings have a port for it. `running(loaded)` returns
    a context manager, which is entered before the first request and left after the last; it calls `loaded` once the
    models are loaded. `collectors` add metrics.
    """
    settings, plane = engine.settings, engine.plane
    access = AccessLog(settings.access_log, settings.access_log_share, settings.access_log_rate)
    infer = (LoggedInferService if access.every else InferService)(plane, settings, engine.reading, access)
    hub = Hub(settings, infer)
    logs = LogSettings()
    endpoint = _grpc_endpoint(engine, control, logs, access)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        hub.start()
        watching = asyncio.create_task(plane.authority.watch(settings.poll_interval))
        async with running(plane.start):
            if endpoint:
                await endpoint.start()
            yield {"hub": hub}
            plane.draining = True
            if endpoint:
                await endpoint.stop()
        watching.cancel()
        hub.stop()
        plane.regions.unregister()
        engine.reading.readers.close()
        await asyncio.to_thread(engine.pool.close)
        if plane.tracing is not None:
            await asyncio.to_thread(plane.tracing.close)

    keyed = plane.authority.mode is Mode.KEYED
    app = Application(keyed=keyed, title="Lathe", version=VERSION, lifespan=lifespan, redirect_slashes=False)
    app.add_middleware(BodyLimits, ledger=engine.reading.ledger, max_body=settings.max_body)
    origins = origins_of(settings.cors_origins)
    app.add_middleware(Authorize, authority=plane.authority, origins=origins)
    app.add_middleware(TrailingNewline)
    app.add_middleware(HeadAsGet)
    app.add_middleware(AccessLogging, access=access)
    app.state.plane, app.state.grpc = plane, endpoint
    install_error_handlers(app)
    add_cors(app, origins)
    app.add_routes(health_routes(plane))
    app.add_routes(v2_routes(plane, infer, engine.book, control, logs))
    app.add_routes(shared_memory_routes(plane.regions))
    texts = TextBook()
    app.add_routes(openai_routes(plane, texts, engine.reading))
    app.add_routes(generate_routes(plane, texts))
    collectors = [
        *collectors,
        TextMetrics(texts, plane.registry.servables),
        ConnectionMetrics(hub.slots, endpoint.connections if endpoint else None),
    ]
    app.add_routes(_metrics_routes(Metrics(engine.book, plane.registry.servables, collectors)))
    for router in routers:
        app.add_routes(router)
    return app


def _grpc_endpoint(
    engine: Engine, control: RepositoryControl, logs: LogSettings, access: AccessLog
) -> GrpcEndpoint | None:
    if engine.settings.grpc_port is None:
        return None
    from lathe.server.api.grpc.endpoint import GrpcEndpoint  # imported here: grpcio is installed by an extra
    from lathe.server.api.grpc.service import ServiceContext

    return GrpcEndpoint(
        ServiceContext(engine.settings, engine.plane, engine.book, control, logs, access, engine.reading)
    )


def _metrics_routes(metrics: Metrics) -> APIRouter:
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    return routes

"""Where the server's objects are built and wired, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Response
from prometheus_client.registry import Collector

from core.runtime.cpus import available_cpus
from server.access.authority import LOOPBACK, Authority, Mode
from server.access.crossorigin import origins_of
from server.access.quotas import Quota, Quotas
from server.api.accessed import Accessed
from server.api.asgi import HeadAsGet
from server.api.authorize import Authorize
from server.api.canary import canary_routes
from server.api.controls import LogSettings
from server.api.crossorigin import allow_pages
from server.api.datasets import datasets_routes
from server.api.described import Application
from server.api.errors import install_error_handlers
from server.api.health import health_routes
from server.api.hub import Hub
from server.api.infer import InferService
from server.api.jobs import jobs_routes
from server.api.logged import LoggedInferService
from server.api.modelinfo import VERSION
from server.api.models import models_routes
from server.api.newline import EndLines
from server.api.reading import Reading
from server.api.received import Received
from server.api.repository import ProtocolControl
from server.api.sharedmemory import shared_memory_routes
from server.api.v2 import RepositoryControl, v2_routes
from server.backends.graph import GraphBackend
from server.backends.numbers import prepare_readers
from server.dataplane import DataPlane, Resolver
from server.datasets.assembly import build_datasets
from server.datasets.service import Datasets
from server.jobs.assembly import Jobs, Ports, build_jobs
from server.jobs.judge import Judge
from server.jobs.metrics import JobMetrics
from server.jobs.parents import RepositoryParents
from server.jobs.publish import Publisher
from server.regions import Regions
from server.repository.artifacts import usable_folder
from server.repository.assembly import Control, build_control
from server.repository.memory import MemoryMetrics
from server.repository.registry import Registry
from server.repository.space import model_space, state_space
from server.scheduling.pool import WorkerPool
from server.scheduling.servable import ServableFactory
from server.settings import Settings
from server.telemetry.access import AccessLog
from server.telemetry.connections import ConnectionMetrics
from server.telemetry.gpus import GpuMetrics
from server.telemetry.metrics import CONTENT_TYPE, Metrics
from server.telemetry.space import SpaceMetrics
from server.telemetry.statistics import StatsBook

if TYPE_CHECKING:
    from server.access.tokens import Tokens
    from server.api.grpc.endpoint import GrpcEndpoint
    from server.telemetry.tracing import Tracing

JobsMaker = Callable[[Settings, Ports, Callable[[], bool]], Jobs]
Running = Callable[[Callable[[], None]], AbstractAsyncContextManager[None]]  # tells when all is loaded


@dataclass(frozen=True, slots=True)
class Engine:
    """The data path's objects, which exist once per process."""

    settings: Settings
    pool: WorkerPool
    book: StatsBook
    factory: ServableFactory
    plane: DataPlane
    reading: Reading

    @classmethod
    def build(cls, settings: Settings, registry: Resolver) -> Engine:
        """Start the worker threads and connect the data plane to what the registry shows."""
        pool, book = WorkerPool(settings.workers), StatsBook()
        tokens, opened = _tokens(settings), settings.open_management
        authority = Authority(settings.host, settings.keys_file, tokens=tokens, open_management=opened)
        plane = DataPlane(registry, authority, _quotas(settings, authority), strict=settings.strict_readiness)
        plane.tracing = _tracing(settings)
        plane.regions = Regions(_allows_regions(settings, authority), settings.max_body)
        return cls(settings, pool, book, ServableFactory(settings, pool, book), plane, Reading(settings, plane))


def _allows_regions(settings: Settings, authority: Authority) -> bool:
    """Whether clients may register shared memory: unless told, where everybody on this machine may do everything."""
    if settings.shared_memory is not None:
        return settings.shared_memory
    return authority.mode is Mode.OPEN and settings.host in LOOPBACK


def _quotas(settings: Settings, authority: Authority) -> Quotas | None:
    rate = settings.client_rate
    if rate is None and settings.keys_file is None:
        return None
    return Quotas(None if rate is None else Quota.of(rate, settings.client_burst), authority.quota)


def _tokens(settings: Settings) -> Tokens | None:
    if settings.jwt_keys is None:
        return None
    from server.access.tokens import Tokens  # only now: the extra that brings pyjwt may be absent

    return Tokens(settings.jwt_keys, settings.jwt_issuer, settings.jwt_audience)


def _tracing(settings: Settings) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    from server.telemetry.tracing import Tracing  # only now: the extra that brings opentelemetry may be absent

    return Tracing(settings.otlp_endpoint, settings.trace_share)


def create_app(settings: Settings) -> FastAPI:
    """Return the application that serves the repository named in the settings."""
    settings = settings.model_copy(update={"cache_dir": usable_folder(settings.cache_folder)})
    prepare_readers(settings.cache_folder / "shared")
    registry = Registry()
    engine = Engine.build(settings, registry)
    control = build_control(settings, registry, GraphBackend(settings.cache_folder / "shared"), engine.factory)
    return assemble_with(engine, control)


def assemble_with(
    engine: Engine, control: Control, datasets: Datasets | None = None, make_jobs: JobsMaker = build_jobs
) -> FastAPI:
    """Return the application over a repository and everything that manages it; the last two are for tests."""
    settings, rollout = engine.settings, control.rollout
    datasets = datasets or build_datasets(settings)
    parents = RepositoryParents(rollout.catalog, control.store)
    judge = Judge(datasets, parents, settings.job_threads or available_cpus(), settings.max_job_files)
    ports = Ports(datasets, parents, Publisher(rollout, judge))
    jobs = make_jobs(settings, ports, lambda: engine.plane.draining)
    datasets.needed = jobs.service.datasets_needed
    engine.plane.awaited = control.readiness.awaited
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
    """Return the application; ``running`` is entered before the first request and left after the last."""
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
    app.add_middleware(Received, ledger=engine.reading.ledger, max_body=settings.max_body)
    origins = origins_of(settings.cors_origins)
    app.add_middleware(Authorize, authority=plane.authority, origins=origins)
    app.add_middleware(EndLines)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Accessed, access=access)
    app.state.plane, app.state.grpc = plane, endpoint
    install_error_handlers(app)
    allow_pages(app, origins)
    app.include_router(health_routes(plane))
    app.include_router(v2_routes(plane, infer, engine.book, control, logs))
    app.include_router(shared_memory_routes(plane.regions))
    collectors = [*collectors, ConnectionMetrics(hub.slots, endpoint.connections if endpoint else None)]
    app.include_router(_metrics_routes(Metrics(engine.book, plane.registry.servables, collectors)))
    for router in routers:
        app.include_router(router)
    app.ready_routes()
    return app


def _grpc_endpoint(
    engine: Engine, control: RepositoryControl, logs: LogSettings, access: AccessLog
) -> GrpcEndpoint | None:
    if engine.settings.grpc_port is None:
        return None
    from server.api.grpc.endpoint import GrpcEndpoint  # only now: the extra that brings grpcio may be absent
    from server.api.grpc.service import Parts

    return GrpcEndpoint(Parts(engine.settings, engine.plane, engine.book, control, logs, access, engine.reading))


def _metrics_routes(metrics: Metrics) -> APIRouter:
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE})

    return routes

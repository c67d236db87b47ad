"""The private parts of Ray that `launch/` leans on: one test each, so that another version of Ray says what has
moved."""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.ray


def test_a_head_node_can_do_without_dashboard_server_monitor_and_log_monitor():
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    assert {"no_monitor", "include_log_monitor", "include_dashboard"} <= set(inspect.signature(RayParams).parameters)
    assert {"head", "shutdown_at_exit", "spawn_reaper", "ray_init_cluster"} <= set(inspect.signature(Node).parameters)
    assert set(inspect.signature(Node.start_api_server).parameters) == {"self", "include_dashboard", "raise_on_failure"}
    assert {"check_alive", "allow_graceful"} <= set(inspect.signature(Node.kill_all_processes).parameters)
    assert isinstance(inspect.getattr_static(Node, "gcs_address"), property)


def test_the_trainer_makes_its_callbacks_and_its_controller_where_they_are_overridden():
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    assert set(inspect.signature(DataParallelTrainer._create_default_callbacks).parameters) == {"self"}
    source = inspect.getsource(DataParallelTrainer.fit)
    assert "self._initialize_and_run_controller(" in source
    assert "scaling_policy=" in source
    made = inspect.getsource(DataParallelTrainer._create_default_callbacks)
    assert "PlacementGroupCleanerCallback()" in made
    assert "DatasetsCallback(" in made


def test_a_worker_does_without_data_sets():
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

    worker = getattr(RayTrainWorker, "__ray_metadata__", None)
    cls = worker.modified_class if worker else RayTrainWorker
    assert inspect.signature(cls.init_train_context).parameters["dataset_shard_provider"].default is None


def test_the_fixed_scaling_policy_speaks_with_an_autoscaler_only_through_the_three_overridden_methods():
    from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
    from ray.train.v2._internal.execution.scaling_policy.scaling_policy import ScalingPolicy

    overridden = ("_send_resource_request", "_maybe_send_resource_request", "_cancel_resource_request")
    for name in overridden:
        assert set(inspect.signature(getattr(ScalingPolicy, name)).parameters) == {"self"}
    users = [name for name, member in vars(ScalingPolicy).items() if "_coordinator_client" in _source(member)]
    assert set(users) <= {*overridden, "__init__", "after_controller_start", "_autoscaling_coordinator"}
    assert issubclass(FixedScalingPolicy, ScalingPolicy)


def test_what_nodes_tell_a_driver_goes_through_the_one_function_that_is_silenced():
    from ray._private import worker

    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)
    assert "print(" not in inspect.getsource(worker.listen_error_messages)
    # From the source: a session that another test had in this process has silenced it.
    assert "\ndef print_to_stdstream(data, ignore_prefix: bool):" in inspect.getsource(worker)


def test_free_resources_are_known_node_by_node():
    from ray._private.state import available_resources_per_node

    assert not inspect.signature(available_resources_per_node).parameters


def test_nodes_that_are_drained_are_listed_with_the_moment_of_their_end():
    from ray._private.state import state

    assert not inspect.signature(state.get_draining_nodes).parameters
    assert "ms" in inspect.getdoc(state.get_draining_nodes)


def test_loopback_stays_loopback_when_no_other_machine_will_join():
    from ray._private import ray_constants, services

    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services.get_node_ip_address)


@pytest.mark.parametrize(
    "name",
    [
        "RAY_TRAIN_ENABLE_PRINT_PATCH",
        "RAY_TRAIN_METRICS_ENABLED",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
        "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING",
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING",
    ],
)
def test_ray_train_still_reads_the_variables_that_keep_it_quiet(name):
    from ray.train.v2._internal import constants

    assert name in vars(constants).values()


def _source(member: object) -> str:
    function = member.fget if isinstance(member, property) else getattr(member, "func", member)
    try:
        return inspect.getsource(function)  # type: ignore[arg-type]
    except TypeError:
        return ""


def test_a_head_is_asked_whether_it_lives_by_a_call_that_needs_no_arguments():
    from ray.core.generated import gcs_service_pb2

    from orchestrator.launch.knock import _ALIVE

    service, method = _ALIVE.strip("/").split("/")
    found = gcs_service_pb2.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    assert found.full_name == service
    request = getattr(gcs_service_pb2, found.methods_by_name[method].input_type.name)
    assert request().SerializeToString() == b""


def test_nodes_of_this_machine_are_found_by_their_processes():
    from ray._private.services import find_node_ids

    assert not inspect.signature(find_node_ids).parameters


def test_an_upload_is_measured_as_it_is_packed(tmp_path):
    from zipfile import ZipFile

    from ray._private.runtime_env.packaging import create_package

    from orchestrator.launch.upload import largest_paths, measure, size_problem

    files = {
        "main.py": 10, "data/a.bin": 5000, "data/deep/b.bin": 3000, "notes/c.txt": 70, "ignored/d.txt": 9, "e.tmp": 4,
        "runs/one/metrics.jsonl": 900, ".venv/lib/x.py": 8, "tools/pyvenv.cfg": 1, "tools/y.py": 2, "sub/skip.me": 6,
        "sub/keep.me": 7,
    }  # fmt: skip
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / ".gitignore").write_text("ignored/\n*.tmp\n")
    (tmp_path / "sub" / ".rayignore").write_text("skip.me\n")
    upload = measure(tmp_path)
    create_package(str(tmp_path), tmp_path / "p.zip", include_gitignore=True, excludes=[*upload.excludes, "p.zip"])
    with ZipFile(tmp_path / "p.zip") as packed:
        sizes = {entry.filename: entry.file_size for entry in packed.infolist() if not entry.is_dir()}
    assert sizes == dict(upload.sizes)
    assert set(sizes) == {".gitignore", "main.py", "data/a.bin", "data/deep/b.bin", "notes/c.txt", "sub/keep.me",
                          "sub/.rayignore"}  # fmt: skip
    assert largest_paths(upload)[:2] == [("data/", 8000), ("notes/", 70)]
    assert size_problem(upload) is None
    problem = size_problem(upload, limit_bytes=1000)
    assert problem is not None
    assert "Largest: data/" in problem.message
    assert (upload.holds("data"), upload.holds("./notes/c.txt"), upload.holds("ignored")) == (True, True, False)


def test_a_job_is_given_time_to_stop_by_its_environment_and_is_known_by_another():
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
    from ray.dashboard.modules.job import job_supervisor

    from orchestrator.config import job_paths

    assert RAY_JOB_CONFIG_JSON_ENV_VAR == job_paths.JOB_VARIABLE
    source = inspect.getsource(job_supervisor)
    assert f'"{job_paths.WAIT_VARIABLE}"' in source
    assert job_supervisor.JobSupervisor.DEFAULT_RAY_JOB_STOP_WAIT_TIME_S == job_paths.RAYS_WAIT_SECONDS


def test_ray_brings_the_library_along_that_nodes_are_asked_for_gpus_with():
    import ray._private.thirdparty.pynvml as nvml

    for name in ("nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMemoryInfo"):
        assert callable(getattr(nvml, name))
    assert issubclass(nvml.NVMLError, Exception)

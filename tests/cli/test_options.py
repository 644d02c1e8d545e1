"""The command line is frozen: an option added, renamed or dropped must be argued for, and this list changed with it."""

from __future__ import annotations

from gpulaunch.launcher.job.option_table import OPTIONS, SECTIONS
from gpulaunch.launcher.job.options import BOOLEAN

TORCHRUNS = """
    --nproc-per-node --nproc_per_node --nproc | PET_NPROC_PER_NODE GPULAUNCH_NPROC
    --nnodes | PET_NNODES
    --node-rank --node_rank | PET_NODE_RANK
    --master-addr --master_addr | PET_MASTER_ADDR
    --master-port --master_port | PET_MASTER_PORT
    -m --module | PET_MODULE
    --no-python --no_python | PET_NO_PYTHON
    --run-path --run_path | PET_RUN_PATH
    --virtual-local-rank --virtual_local_rank | PET_VIRTUAL_LOCAL_RANK
    --numa-binding --numa_binding | PET_NUMA_BINDING
    -r --redirects | PET_REDIRECTS
    -t --tee | PET_TEE
    --local-ranks-filter --local_ranks_filter | PET_LOCAL_RANKS_FILTER
    --log-line-prefix-template --log_line_prefix_template | PET_LOG_LINE_PREFIX_TEMPLATE
    --duplicate-stdout-filters --duplicate_stdout_filters | PET_DUPLICATE_STDOUT_FILTERS
    --duplicate-stderr-filters --duplicate_stderr_filters | PET_DUPLICATE_STDERR_FILTERS
    --log-dir --log_dir | PET_LOG_DIR
    --role | PET_ROLE
    --logs-specs --logs_specs | PET_LOGS_SPECS
    --event-log-handler --event_log_handler | PET_EVENT_LOG_HANDLER
    --max-restarts --max_restarts | PET_MAX_RESTARTS
    --shutdown-timeout --shutdown_timeout | PET_SHUTDOWN_TIMEOUT
    --signals-to-handle --signals_to_handle | PET_SIGNALS_TO_HANDLE
    --monitor-interval --monitor_interval | PET_MONITOR_INTERVAL
    --start-method --start_method | PET_START_METHOD
    --standalone | PET_STANDALONE
    --rdzv-backend --rdzv_backend | PET_RDZV_BACKEND
    --rdzv-endpoint --rdzv_endpoint | PET_RDZV_ENDPOINT
    --rdzv-id --rdzv_id | PET_RDZV_ID
    --rdzv-conf --rdzv_conf | PET_RDZV_CONF
    --local-addr --local_addr | PET_LOCAL_ADDR
"""
OURS = """
    --config | GPULAUNCH_CONFIG
    --name | GPULAUNCH_NAME
    --job-dir --job_dir | GPULAUNCH_JOB_DIR
    --dry-run --dry_run | GPULAUNCH_DRY_RUN
    --gpus | GPULAUNCH_GPUS
    --gpu-memory-fraction --gpu_memory_fraction | GPULAUNCH_GPU_MEMORY_FRACTION
    --console | GPULAUNCH_CONSOLE
    --preload | GPULAUNCH_PRELOAD
    --no-profile --no_profile | GPULAUNCH_NO_PROFILE
    --profile-budget --profile_budget | GPULAUNCH_PROFILE_BUDGET
    --metrics-addr --metrics_addr | GPULAUNCH_METRICS_ADDR
    --metrics-web-config --metrics_web_config | GPULAUNCH_METRICS_WEB_CONFIG
    --metrics-sd --metrics_sd | GPULAUNCH_METRICS_SD
    --metrics-push --metrics_push | GPULAUNCH_METRICS_PUSH
    --metrics-otlp --metrics_otlp | GPULAUNCH_METRICS_OTLP
    --restart-rate --restart_rate | GPULAUNCH_RESTART_RATE
    --restart-backoff --restart_backoff | GPULAUNCH_RESTART_BACKOFF
    --leftovers | GPULAUNCH_LEFTOVERS
    --no-progress-limit --no_progress_limit | GPULAUNCH_NO_PROGRESS_LIMIT
    --leftovers | GPULAUNCH_LEFTOVERS
    --resume-search-timeout --resume_search_timeout | GPULAUNCH_RESUME_SEARCH_TIMEOUT
    --failure-grace --failure_grace | GPULAUNCH_FAILURE_GRACE
    --resume | GPULAUNCH_RESUME
    --resume-arg --resume_arg | GPULAUNCH_RESUME_ARG
    --checkpoint-dir --checkpoint_dir | GPULAUNCH_CHECKPOINT_DIR
    --replicate | GPULAUNCH_REPLICATE
    --checkpoint-pattern --checkpoint_pattern | GPULAUNCH_CHECKPOINT_PATTERN
    --preempt-signals --preempt_signals | GPULAUNCH_PREEMPT_SIGNALS
    --notify-signals --notify_signals | GPULAUNCH_NOTIFY_SIGNALS
    --on-hang --on_hang | GPULAUNCH_ON_HANG
    --hang-timeout --hang_timeout | GPULAUNCH_HANG_TIMEOUT
    --first-step-timeout --first_step_timeout | GPULAUNCH_FIRST_STEP_TIMEOUT
    --token-file --token_file | GPULAUNCH_TOKEN_FILE
    --insecure | GPULAUNCH_INSECURE
"""


def spellings(*, ours: bool) -> set[str]:
    return {
        f"{' '.join(sorted(option.option_strings))} | {' '.join(option.environment)}"
        for option in OPTIONS
        if option.ours is ours
    }


def frozen(text: str) -> set[str]:
    lines = (line.partition(" | ") for line in text.strip().splitlines())
    return {f"{' '.join(sorted(names.split()))} | {variables}" for names, _, variables in lines}


def test_torchruns_options_are_these() -> None:
    assert spellings(ours=False) == frozen(TORCHRUNS)


def test_our_own_options_are_these() -> None:
    assert spellings(ours=True) == frozen(OURS)


def test_no_two_options_share_a_spelling_or_a_variable() -> None:
    for each in ("option_strings", "environment"):
        words = [word for option in OPTIONS for word in getattr(option, each)]
        assert len(words) == len(set(words))


def test_every_option_is_explained_in_a_section_that_help_prints() -> None:
    assert {option.section for option in OPTIONS} == set(SECTIONS)
    assert [option.name for option in OPTIONS if not option.help] == []


def test_flags_are_booleans_in_a_job_file_and_nothing_else_is() -> None:
    assert [option.name for option in OPTIONS if option.is_flag != (option.toml == BOOLEAN)] == []

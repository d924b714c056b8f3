"""What TensorBoard is told once about a run: the layout of its Custom Scalars tab, and the row of its HParams tab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from tensorboard.compat.proto.summary_pb2 import (
    DataClass,  # pyright: ignore[reportAttributeAccessIssue]
    Summary,  # pyright: ignore[reportAttributeAccessIssue]
    SummaryMetadata,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams.metadata import (
    EXPERIMENT_TAG,
    NULL_TENSOR,
    PLUGIN_DATA_VERSION,
    PLUGIN_NAME,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
)
from torch.utils.tensorboard.summary import custom_scalars

from stillhouse.learner.reports.declared import DECLARED, charts, meaning_of, title_of
from stillhouse.learner.reports.settings import Setting

api: Any = api_pb2  # protocol buffers: their classes are made at run time
plugin: Any = plugin_data_pb2

_PLUGINS: Final = {
    "simple_value": ("scalars", "DATA_CLASS_SCALAR"),
    "histo": ("histograms", "DATA_CLASS_TENSOR"),
}
"""Kind of a value -> the part of TensorBoard that shows it, and the class of its data."""


def layout() -> Any:
    """Summary with the groups of charts."""
    # TensorBoard matches each tag as a regular expression, from its beginning.
    groups = {
        group: {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in shown.items()}
        for group, shown in charts().items()
    }
    return custom_scalars(groups)


def run_starts(name: str, settings: Mapping[str, Setting], unix_s: float) -> list[Any]:
    """Summaries with a run's settings, and with the columns of the table in which it is a row."""
    columns = [api.HParamInfo(name=key, type=_kind(value)) for key, value in settings.items()]
    results = [
        api.MetricInfo(
            name=api.MetricName(tag=tag),
            display_name=tag.partition("/")[0] + ": " + title_of(tag),
            description=meaning_of(tag),
        )
        for tag in (one.tag for one in DECLARED.values() if one.result)
    ]
    experiment = api.Experiment(hparam_infos=columns, metric_infos=results, time_created_secs=unix_s)
    start = plugin.SessionStartInfo(group_name=name, start_time_secs=unix_s)
    for key, value in settings.items():
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    return [
        _hparams(EXPERIMENT_TAG, experiment=experiment),
        _hparams(SESSION_START_INFO_TAG, session_start_info=start),
    ]


def run_ends(status: Literal["SUCCESS", "FAILURE"], unix_s: float) -> Any:
    """Summary that says how the run ended."""
    end = plugin.SessionEndInfo(status=api.Status.Value(f"STATUS_{status}"), end_time_secs=unix_s)
    return _hparams(SESSION_END_INFO_TAG, session_end_info=end)


def describe(summary: Any) -> None:
    """Give the first value of each tag its title and meaning, which TensorBoard shows beside the chart."""
    for value in summary.value:
        tag = value.tag.removesuffix("/text_summary")
        value.metadata.display_name = title_of(tag)
        value.metadata.summary_description = meaning_of(tag)
        # TensorBoard's data server drops the metadata of values that do not say what they are.
        if (kind := value.WhichOneof("value")) in _PLUGINS:
            value.metadata.plugin_data.plugin_name, data_class = _PLUGINS[kind]
            value.metadata.data_class = DataClass.Value(data_class)


def _kind(value: Setting) -> Any:
    kind = "BOOL" if isinstance(value, bool) else "STRING" if isinstance(value, str) else "FLOAT64"
    return api.DataType.Value(f"DATA_TYPE_{kind}")


def _hparams(tag: str, **content: Any) -> Any:
    data = plugin.HParamsPluginData(version=PLUGIN_DATA_VERSION, **content).SerializeToString()
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=data))
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=NULL_TENSOR)])

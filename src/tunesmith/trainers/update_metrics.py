"""The optimizer's figures of a step, the same for every trainer."""

from collections.abc import Sequence

from tunesmith.models.optimizer import StepReport


def update_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """Gradient norm (mean over the updates), learning rate, refused updates, and for float16 weights the loss scale.

    An update whose gradient overflowed has no norm; it is left out of the mean unless there is no other.
    """
    norms = [report.grad_norm for report in reports if not report.overflowed] or [reports[-1].grad_norm]
    last = reports[-1]
    metrics = {
        "grad_norm": sum(norms) / len(norms),
        "lr": last.learning_rate,
        "refused_steps": float(sum(report.refused for report in reports)),
    }
    if last.loss_scale is not None:
        metrics["loss_scale"] = last.loss_scale
        metrics["overflowed_steps"] = float(sum(report.overflowed for report in reports))
    return metrics

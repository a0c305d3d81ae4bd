"""What people see of a tuner."""

from covey.core.ids import HostId
from plugins.tuner.machine.tuner import Tuner
from plugins.tuner.policy.division import HostPart
from plugins.views import PredictionView, TunedHostView, TunedJobView

PREDICTIONS_SHOWN = 8


def tuned_view(tuner: Tuner, coordinator: HostId, asked: int) -> TunedJobView:
    """What this tuner measured and decided."""
    present, best = tuner.division(), tuner.best
    hosts = []
    for host in sorted(tuner.hosts()):
        now, part = tuner.now.hosts.get(host), present.get(host, HostPart(0, 0))
        pass_s, card = tuner.passes.get(host), tuner.cards.get(host)
        wanted = best[0].get(host) if best is not None else None
        hosts.append(
            TunedHostView(
                host=host,
                role=part.role,
                processes=now.processes if now is not None else 0,
                ranks=part.ranks,
                tables=part.tables,
                best_ranks=wanted.ranks if wanted is not None else None,
                best_tables=wanted.tables if wanted is not None else None,
                pass_s=pass_s.mean if pass_s is not None else None,
                card_bytes_per_s=card.mean if card is not None else None,
            )
        )
    return TunedJobView(
        job=tuner.job,
        coordinator=coordinator,
        asked=asked,
        doing=tuner.doing,
        left_alone=tuner.left_alone,
        config=tuner.now.config,
        hosts=hosts,
        model_bytes=tuner.tensors.total_bytes,
        step_s=tuner.step.mean if tuner.step is not None else None,
        best_step_s=best[1] if best is not None else None,
        predictions=[
            PredictionView(each.before_s, each.predicted_s, each.measured_s)
            for each in tuner.judged[-PREDICTIONS_SHOWN:]
        ],
    )

"""How much remote memory a tenant may have: checked where a volume is attached, and again where a slab is lent."""

from collections.abc import Iterable, Mapping

from covey.units import format_size


def budget_of(tenant: str, budgets: Mapping[str, int], default: int | None) -> int | None:
    """Bytes; None: not limited, as is what belongs to no tenant."""
    return budgets.get(tenant, default) if tenant else None


def over_budget(tenant: str, has: Iterable[int], more: int, budget: int | None) -> str:
    """Why a tenant that has these, bytes each, cannot have so many more; empty: it can."""
    taken = sum(has)
    if budget is None or taken + more <= budget:
        return ""
    return f"tenant {tenant} has {format_size(taken)} of {format_size(budget)}, and this is {format_size(more)} more"

"""The `sparseflow` command."""

from __future__ import annotations

import click

from sparseflow.cli.chat import chat
from sparseflow.cli.doctor import doctor
from sparseflow.cli.inspect import inspect
from sparseflow.cli.options import EXIT_STATUSES, SparseFlowGroup
from sparseflow.cli.report import report
from sparseflow.cli.route import route
from sparseflow.cli.run import run
from sparseflow.cli.verify import verify


@click.group(cls=SparseFlowGroup, epilog=EXIT_STATUSES)
@click.version_option(package_name="sparseflow")
def main() -> None:
    """Run large Mixture-of-Experts models on a CPU with less memory than the model.

    MODEL is a folder made by sf-pack, or "demo": a small model that comes with the package and is packed on first use.

    \b
    Examples:
      sparseflow run demo "The red fox" --cache 1MiB
      sparseflow chat demo
      sparseflow inspect demo
      sparseflow doctor demo
      sparseflow verify demo
    """


main.add_command(run)
main.add_command(chat)
main.add_command(inspect)
main.add_command(route)
main.add_command(report)
main.add_command(doctor)
main.add_command(verify)

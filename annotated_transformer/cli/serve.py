"""``serve`` answers requests for translations over HTTP, with a page to try it."""

from annotated_transformer.cli.options import Search, Serve
from annotated_transformer.cli.output import log, print_result
from annotated_transformer.cli.systems import PACKAGED, open_pretrained, open_system, refuse_parser
from annotated_transformer.serving.app import Service
from annotated_transformer.serving.requests import Limits
from annotated_transformer.serving.server import address_of_socket, listen, serve

LOCAL = ("127.", "::1", "localhost")


def run(command: Serve) -> int:
    """Serve until a signal comes."""
    search = Search(**vars(command.decoding))
    limits = Limits(queue=command.queue, seconds=command.timeout)
    folder = command.model
    with listen(command.host, command.port) as sock:
        if folder is None:
            system, pretrained = open_pretrained(search)
            service = Service(system, limits, "The model of the book", pretrained)
            by = PACKAGED
        else:
            system, used = open_system(folder, search)
            refuse_parser(system, folder)
            service, by = Service(system, limits, folder.resolve().name), str(folder / used)

        def started() -> None:
            print_result(address_of_socket(sock))
            log(f"serving {by}; Ctrl-C stops")
            if not command.host.startswith(LOCAL):
                log("anyone who can reach this address can use the server; it asks for no password")

        serve(service, sock, started)
    return 0

# The server, run by a user without rights, with the model that comes with the package:
#   docker build -t annotated-transformer .
#   docker run --rm -p 127.0.0.1:8000:8000 annotated-transformer
# With a system of your own:
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/runs/mine:/system:ro" annotated-transformer /system
# pip takes PyTorch with its libraries for graphics cards, which is large. For the smaller one, give
# the address of PyTorch's packages for processors: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.12-slim
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY annotated_transformer annotated_transformer
RUN pip install --no-cache-dir ".[serve,translation]" \
    && useradd --uid 10001 --create-home reader
USER 10001
WORKDIR /srv
ENV PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# As the first process it gets the signal of `docker stop`, and answers what it has accepted.
ENTRYPOINT ["annotated-transformer", "serve", "--host", "0.0.0.0"]

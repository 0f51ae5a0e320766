# The demo policy on a CPU, to try a client, a front or a dashboard with. Built from the repository's folder:
#
#     docker build -f deploy/docker/demo.Dockerfile -t relay-demo .
#     docker run --rm -p 127.0.0.1:8000:8000 relay-demo
#
# It asks for no key: publish its port to this machine only. See docs/deployment.md.
FROM python:3.11-slim-bookworm

# uv knows where PyTorch's CPU builds are: 190 MB instead of several gigabytes.
ARG UV_VERSION=0.13.8
RUN pip install --no-cache-dir "uv==${UV_VERSION}"

ARG TORCH_VERSION=2.13.0
RUN uv pip install --system --no-cache --torch-backend=cpu "torch==${TORCH_VERSION}"

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY src src
RUN uv pip install --system --no-cache --torch-backend=cpu -c requirements/python3.11.txt '.[server]' && \
    useradd --uid 10001 --create-home relay
USER 10001
ENV PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=2

# Observations on 8000, numbers for Prometheus on 9100.
EXPOSE 8000 9100

HEALTHCHECK --interval=5s --timeout=3s --start-period=2m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["relay", "serve"]
CMD ["demo", "--host", "0.0.0.0", "--insecure", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]

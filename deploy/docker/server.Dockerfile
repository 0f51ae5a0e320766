# A server for a machine with an NVIDIA GPU. Built from the repository's folder, and never with a checkpoint in it:
#
#     docker build -f deploy/docker/server.Dockerfile -t relay-server .
#
# The CUDA libraries come with PyTorch, the driver from the host (NVIDIA Container Toolkit). See docs/deployment.md.
FROM python:3.11-slim-bookworm

# What Triton builds with, for `--compile`.
ARG COMPILER=""
# hadolint ignore=DL3008
RUN if [ -n "$COMPILER" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi

ARG TORCH_VERSION=2.13.0
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}"

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY src src
RUN pip install --no-cache-dir -c requirements/python3.11.txt '.[server]' && \
    useradd --uid 10001 --create-home relay
USER 10001
ENV PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# Observations on 8000, numbers for Prometheus on 9100.
EXPOSE 8000 9100

# 503 while the policy loads, which may take minutes; 200 from then on.
HEALTHCHECK --interval=5s --timeout=3s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]

# SIGTERM drains: give the container more than 15 s to stop.
STOPSIGNAL SIGTERM
ENTRYPOINT ["relay", "serve"]
CMD ["pi05", "--checkpoint", "/checkpoint", "--host", "0.0.0.0", "--metrics-host", "0.0.0.0", "--metrics-port", "9100"]

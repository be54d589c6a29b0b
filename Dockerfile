# The Endpoint Picker as an image: `docker build -t epp .`, then `docker run epp --endpoints ...`.
#
# What is pinned, and where:
# - Python: its minor version, by the tag below; patch releases and Debian's fixes come with each
#   build. A build that must be repeatable names a digest:
#   --build-arg PYTHON_IMAGE=python:3.11-slim@sha256:...
# - The packages it needs: to ranges, in pyproject.toml and nowhere else; a build takes the newest
#   of each range. What an image has, it tells:
#   docker run --rm --entrypoint python IMAGE -m pip --python /opt/epp/bin/python list
# - Our own modules that run for each message are compiled (setup.py); --build-arg EPP_COMPILE=0
#   leaves them as they are. Nothing else is: a package without a wheel for the platform stops the
#   build.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# Of Debian's compiler, as of its fixes, a build takes what is current.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml setup.py README.md LICENSE ./
COPY epp ./epp
ARG EPP_COMPILE=1
# Installing compiles to bytecode, so that the process starts fast and has nothing to write.
RUN EPP_COMPILE=${EPP_COMPILE} python -m pip wheel --no-deps --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/epp \
    && python -m pip --python /opt/epp/bin/python install --only-binary :all: /wheels/*.whl

FROM ${PYTHON_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Envoy Endpoint Picker" \
      org.opencontainers.image.description="Routes each LLM request to the vLLM endpoint that will answer soonest" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/epp /opt/epp
# Fits a read-only root file system: nothing is written anywhere.
ENV PATH="/opt/epp/bin:${PATH}" PYTHONDONTWRITEBYTECODE=1
# A number, so that `runAsNonRoot` can be checked without a look into /etc/passwd.
USER 65532:65532
# ext_proc, health, metrics
EXPOSE 9002 9003 9090
# Arguments of `docker run`, or `args` of a pod, are flags of `epp serve`. Other commands:
# docker run --rm -i --entrypoint epp IMAGE check - <config.yaml
ENTRYPOINT ["/opt/epp/bin/epp", "serve"]

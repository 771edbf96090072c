# ddpexp in a container, on CPUs or NVIDIA GPUs. docs/containers.md explains how to run it.
#
#     docker build -t ddpexp .                                                      # torch for CUDA 13
#     docker build -t ddpexp --build-arg TORCH=cpu --build-arg TORCH_INDEX=URL .    # torch for CPUs
#
# The image contains Python, an init process, ddpexp and its requirements: no data, no recipes of yours, no secrets.
# Everything is installed by hash, what builds packages too. Only torch for CUDA is among the locked packages: torch for
# CPUs comes from the package index that pytorch.org/get-started shows (TORCH_INDEX), and without a hash unless there is
# a requirements-cpu.lock (requirements-cuda13.lock says how to write one).
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH=cuda13
ARG TORCH_INDEX=none
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements*.lock constraints.txt ./
RUN python -m venv /opt/build \
    && python -m venv /opt/ddpexp \
    && /opt/build/bin/pip install --no-deps --require-hashes -r requirements-build.lock
RUN if [ -e "requirements-${TORCH}.lock" ]; then \
        /opt/ddpexp/bin/pip install --no-deps --require-hashes -r "requirements-${TORCH}.lock"; \
    elif [ "${TORCH}" = cpu ] && [ "${TORCH_INDEX}" != none ]; then \
        /opt/ddpexp/bin/pip install --no-deps --index-url "${TORCH_INDEX}" -c constraints.txt torch; \
    else \
        echo "TORCH=${TORCH}: use cuda13, or cpu with TORCH_INDEX=URL (see pytorch.org/get-started)" >&2; exit 2; \
    fi
RUN /opt/build/bin/pip wheel --no-deps --require-hashes --no-build-isolation -w /wheels -r requirements.lock \
    && /opt/ddpexp/bin/pip install --no-deps --no-index /wheels/*.whl
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY recipes recipes
COPY ddpexp ddpexp
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation -w /wheels . \
    && /opt/ddpexp/bin/pip install --no-deps --no-index /wheels/ddpexp-*.whl \
    && /opt/ddpexp/bin/pip check

FROM python:${PYTHON}-slim-bookworm
# More Debian packages: trainer.compile=true needs g++, and manifest.json records the commit of your code with git.
ARG PACKAGES=""
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini ${PACKAGES} \
    && rm -rf /var/lib/apt/lists/*
# /experiments is the current folder and the home of whoever runs the container, with any user ID: mount a volume there.
RUN groupadd --gid 1000 ddpexp \
    && useradd --uid 1000 --gid 1000 --home-dir /experiments --no-create-home --shell /bin/bash ddpexp \
    && install --directory --owner=ddpexp --group=ddpexp --mode=1777 /experiments /experiments/outputs /data
COPY --from=build /opt/ddpexp /opt/ddpexp
ENV PATH=/opt/ddpexp/bin:/usr/local/bin:/usr/bin:/bin HOME=/experiments DDPEXP_DATA=/data \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /experiments
STOPSIGNAL SIGTERM
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["python", "-m", "ddpexp", "--help"]

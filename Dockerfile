# One image for `worker` and `producer`, without a model: --build-arg EXTRA=cpu or cuda13 (the GPU's libraries
# come from PyPI; the machine needs NVIDIA's driver and container toolkit). Runs as 10001 on a read-only root:
# only /cache (compiled kernels, worth keeping) and /tmp are written to.
ARG BASE=python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1

FROM ${BASE} AS build
ARG EXTRA=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/livebatch
WORKDIR /src
# The dependencies alone, by way of a package that is still empty: this layer outlives changes of our code.
COPY pyproject.toml constraints.txt ./
RUN touch README.md LICENSE && mkdir producer worker kernels \
 && /opt/livebatch/bin/pip install --constraint constraints.txt ".[${EXTRA}]"
COPY README.md LICENSE ./
COPY producer producer
COPY kernels kernels
COPY worker worker
RUN /opt/livebatch/bin/pip install --no-deps --force-reinstall .

FROM ${BASE}
RUN install -d -o 10001 -g 10001 /cache
COPY --from=build /opt/livebatch /opt/livebatch
ENV PATH=/opt/livebatch/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/cache \
    NUMBA_CACHE_DIR=/cache/numba \
    CUPY_CACHE_DIR=/cache/cupy \
    CUDA_CACHE_PATH=/cache/cuda
USER 10001:10001
WORKDIR /models
VOLUME /cache
ENTRYPOINT ["worker"]
CMD ["run"]

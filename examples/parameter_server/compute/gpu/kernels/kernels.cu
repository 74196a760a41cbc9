// The model on a GPU. All arguments are 8 bytes long; addresses are the device's, also of host memory that it reaches.
//
// `kernels.ptx` beside this file is made of it, for compute capability 7.0 and everything newer, by `make_ptx.py` beside it with NVRTC 11.8,
// which needs no GPU. It is PTX 7.0, which drivers of CUDA 11.0 and later take.
//
// Each number is summed up by one thread, over samples or gradients in their order, and no two threads add to one place. So what comes out
// depends on what went in, and on nothing else.

typedef unsigned long long u64;
typedef unsigned int u32;

constexpr int PIXELS = 64;
constexpr int HIDDEN = 64;
constexpr int CLASSES = 10;

// Where each part of the parameters lies, and of a gradient, as in `model.rs`.
constexpr int BIASES1 = PIXELS * HIDDEN;
constexpr int WEIGHTS2 = BIASES1 + HIDDEN;
constexpr int BIASES2 = WEIGHTS2 + HIDDEN * CLASSES;
constexpr int PARAMETERS = BIASES2 + CLASSES;

// Samples that are in shared memory at a time, and a row of their hidden layer: one more, so that rows begin in different banks.
constexpr int CHUNK = 32;
constexpr int ROW = HIDDEN + 1;

constexpr int THREADS = 512;
// Threads that have the same neuron.
constexpr int GROUPS = THREADS / HIDDEN;

// One block of 512 threads. `out` gets the mean gradient of the samples order[first .. first + count], and behind it their mean loss.
extern "C" __global__ void __launch_bounds__(THREADS) gradient(
    const float* __restrict__ parameters, const float* __restrict__ pixels, const u32* __restrict__ classes,
    const u32* __restrict__ order, u64 first, u64 count, float* __restrict__ out)
{
    __shared__ float weights1[PIXELS * HIDDEN];
    __shared__ float weights2[HIDDEN * CLASSES];
    __shared__ float pixel[CHUNK][PIXELS];
    __shared__ float hidden[CHUNK][ROW];
    __shared__ float error[CHUNK][CLASSES];
    __shared__ float loss[CHUNK];

    const int thread = threadIdx.x;
    const int neuron = thread % HIDDEN;
    const int group = thread / HIDDEN;

    for (int i = thread; i < PIXELS * HIDDEN; i += THREADS) weights1[i] = parameters[i];
    for (int i = thread; i < HIDDEN * CLASSES; i += THREADS) weights2[i] = parameters[WEIGHTS2 + i];
    const float bias1 = parameters[BIASES1 + neuron];

    const float share = 1.0f / (float)count;
    // What this thread sums up: of weights1 those between `neuron` and each GROUPS-th pixel, of weights2 up to two, and a bias.
    float sums1[PIXELS / GROUPS];
    float sums2[2] = {0.0f, 0.0f};
    float bias = 0.0f;
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < PIXELS / GROUPS; k++) sums1[k] = 0.0f;

    for (u64 done = 0; done < count; done += CHUNK) {
        const int samples = (int)(count - done < CHUNK ? count - done : CHUNK);
        // Nobody uses the chunk before any more.
        __syncthreads();
        for (int i = thread; i < CHUNK * PIXELS; i += THREADS) {
            const int sample = i / PIXELS;
            pixel[sample][i % PIXELS] =
                sample < samples ? pixels[(u64)order[first + done + sample] * PIXELS + i % PIXELS] : 0.0f;
        }
        __syncthreads();

        float sum[CHUNK / GROUPS];
#pragma unroll
        for (int k = 0; k < CHUNK / GROUPS; k++) sum[k] = bias1;
#pragma unroll 8
        for (int p = 0; p < PIXELS; p++) {
            const float weight = weights1[p * HIDDEN + neuron];
#pragma unroll
            for (int k = 0; k < CHUNK / GROUPS; k++) sum[k] += pixel[group + k * GROUPS][p] * weight;
        }
#pragma unroll
        for (int k = 0; k < CHUNK / GROUPS; k++) hidden[group + k * GROUPS][neuron] = fmaxf(sum[k], 0.0f);
        __syncthreads();

        if (thread < CHUNK * CLASSES) {
            const int sample = thread / CLASSES;
            const int output = thread % CLASSES;
            float score = parameters[BIASES2 + output];
#pragma unroll 8
            for (int h = 0; h < HIDDEN; h++) score += hidden[sample][h] * weights2[h * CLASSES + output];
            error[sample][output] = score;
        }
        __syncthreads();

        // Softmax, less the largest one, so that no exponential overflows; and of it and cross entropy together the error: what was said
        // minus what is true.
        if (thread < samples) {
            const u32 truth = classes[order[first + done + thread]];
            float largest = error[thread][0];
            for (int c = 1; c < CLASSES; c++) largest = fmaxf(largest, error[thread][c]);
            const float score = error[thread][truth] - largest;
            float all = 0.0f;
            for (int c = 0; c < CLASSES; c++) {
                const float power = expf(error[thread][c] - largest);
                error[thread][c] = power;
                all += power;
            }
            for (int c = 0; c < CLASSES; c++)
                error[thread][c] = (error[thread][c] / all - (c == truth ? 1.0f : 0.0f)) * share;
            loss[thread] = logf(all) - score;
        }
        __syncthreads();

        // While the hidden layer is still there: what leads from it to the outputs.
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int i = thread + k * THREADS;
            if (i < HIDDEN * CLASSES)
                for (int s = 0; s < samples; s++) sums2[k] += hidden[s][i / CLASSES] * error[s][i % CLASSES];
        }
        if (thread < CLASSES)
            for (int s = 0; s < samples; s++) bias += error[s][thread];
        if (thread == CLASSES)
            for (int s = 0; s < samples; s++) total += loss[s];
        __syncthreads();

        // In its place, the error of the hidden layer.
#pragma unroll
        for (int k = 0; k < CHUNK / GROUPS; k++) {
            const int s = group + k * GROUPS;
            float back = 0.0f;
            if (s < samples && hidden[s][neuron] > 0.0f)
                for (int c = 0; c < CLASSES; c++) back += weights2[neuron * CLASSES + c] * error[s][c];
            hidden[s][neuron] = back;
        }
        __syncthreads();

        for (int s = 0; s < samples; s++) {
            const float back = hidden[s][neuron];
#pragma unroll
            for (int k = 0; k < PIXELS / GROUPS; k++) sums1[k] += pixel[s][group + k * GROUPS] * back;
        }
        // The threads behind those that sum up the outputs' biases and the loss.
        if (thread >= HIDDEN && thread < 2 * HIDDEN)
            for (int s = 0; s < samples; s++) bias += hidden[s][neuron];
    }

#pragma unroll
    for (int k = 0; k < PIXELS / GROUPS; k++) out[(group + k * GROUPS) * HIDDEN + neuron] = sums1[k];
#pragma unroll
    for (int k = 0; k < 2; k++)
        if (thread + k * THREADS < HIDDEN * CLASSES) out[WEIGHTS2 + thread + k * THREADS] = sums2[k];
    if (thread >= HIDDEN && thread < 2 * HIDDEN) out[BIASES1 + neuron] = bias;
    if (thread < CLASSES) out[BIASES2 + thread] = bias;
    if (thread == CLASSES) out[PARAMETERS] = total * share;
}

// One block of 1024 threads. Takes a gradient, and the loss behind it, out of a slot that its worker may write into again at any time; `found` gets the
// square of its length as a vector, and the loss. Both are of what was taken.
extern "C" __global__ void __launch_bounds__(1024) take(
    const volatile float* slot, float* __restrict__ taken, double* __restrict__ found)
{
    __shared__ double warps[32];
    const int thread = threadIdx.x;
    double sum = 0.0;
    for (int i = thread; i <= PARAMETERS; i += 1024) {
        // Once: what is measured is what is taken.
        const float value = slot[i];
        taken[i] = value;
        if (i < PARAMETERS)
            sum += (double)value * (double)value;
        else
            found[1] = (double)value;
    }
    // In pairs, always the same ones.
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_down_sync(0xffffffffu, sum, apart);
    if (thread % 32 == 0) warps[thread / 32] = sum;
    __syncthreads();
    if (thread < 32) {
        sum = warps[thread];
        for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_down_sync(0xffffffffu, sum, apart);
        if (thread == 0) found[0] = sum;
    }
}

// Blocks of 128 threads, a thread for each parameter. A step down from the parameters at `from` to those at `to`: `gradients` holds the addresses of
// `count` gradients, `rate` a float. If a parameter is not finite any more, `broken` gets 1.
extern "C" __global__ void __launch_bounds__(128) descend(
    const float* __restrict__ from, float* __restrict__ to, const u64* __restrict__ gradients, u64 count, u64 rate,
    u64* broken)
{
    // The host's memory, where they are, is far away: each block goes there once for many.
    __shared__ u64 addresses[128];
    const u32 thread = threadIdx.x;
    const u32 i = blockIdx.x * 128 + thread;
    const float speed = __uint_as_float((u32)rate);
    float parameter = i < PARAMETERS ? from[i] : 0.0f;
    for (u64 done = 0; done < count; done += 128) {
        __syncthreads();
        if (done + thread < count) addresses[thread] = gradients[done + thread];
        __syncthreads();
        const int here = (int)(count - done < 128 ? count - done : 128);
        if (i < PARAMETERS)
            for (int g = 0; g < here; g++) parameter -= speed * ((const float*)addresses[g])[i];
    }
    if (i < PARAMETERS) {
        to[i] = parameter;
        if (!isfinite(parameter)) *broken = 1;
    }
}

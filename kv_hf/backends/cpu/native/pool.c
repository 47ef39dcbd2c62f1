/* Threads for the kernels: torch's own, or some that are made for a call.
 *
 * torch's OpenMP threads spin for a while between two parallel regions, so that a second set of threads would
 * have to compete with them for the cores. Where torch's OpenMP is at hand, kv_hf_use_openmp() hands over its
 * GOMP_parallel and the same threads serve both. Elsewhere (in a forked process, whose OpenMP threads are gone) each call
 * makes threads and joins them. */
#include "numbers.h"

#include <pthread.h>
#include <stddef.h>

#define MAX_WORKERS 256

typedef void (*Region)(void (*)(void *), void *, unsigned, unsigned);
static Region openmp_region;

typedef struct {
    Task task;
    void *context;
    int64_t tasks;
    atomic_long next;
} Job;

static void run(void *data) {
    Job *mine = data;
    for (;;) {
        int64_t index = atomic_fetch_add(&mine->next, 1);
        if (index >= mine->tasks) return;
        mine->task(mine->context, index);
    }
}

static void *worker(void *data) {
    run(data);
    return NULL;
}

static void run_on_own_threads(Job *job, int64_t threads) {
    pthread_t made[MAX_WORKERS];
    int count = 0;
    if (threads > job->tasks) threads = job->tasks;
    while (count < threads - 1 && count < MAX_WORKERS) {
        if (pthread_create(&made[count], NULL, worker, job)) break; /* fewer threads, the same result */
        count++;
    }
    run(job);
    while (count) pthread_join(made[--count], NULL);
}

static void after_fork(void) { openmp_region = NULL; }

__attribute__((constructor)) static void register_fork(void) { pthread_atfork(NULL, NULL, after_fork); }

typedef struct {
    float *held[NUM_PURPOSES];
    int64_t floats[NUM_PURPOSES];
} Memory;

static pthread_key_t memory_key;

static void free_memory(void *memory) {
    for (int i = 0; i < NUM_PURPOSES; i++) free(((Memory *)memory)->held[i]);
    free(memory);
}

__attribute__((constructor)) static void make_key(void) { pthread_key_create(&memory_key, free_memory); }

float *kv_hf_scratch(int purpose, int64_t floats) {
    Memory *memory = pthread_getspecific(memory_key);
    if (!memory) {
        memory = calloc(1, sizeof(Memory));
        if (!memory || pthread_setspecific(memory_key, memory)) {
            free(memory);
            return NULL;
        }
    }
    if (floats > memory->floats[purpose]) {
        free(memory->held[purpose]);
        memory->floats[purpose] = 0;
        if (posix_memalign((void **)&memory->held[purpose], 64, floats * sizeof(float))) {
            memory->held[purpose] = NULL;
            return NULL;
        }
        memory->floats[purpose] = floats;
    }
    return memory->held[purpose];
}

void kv_hf_use_openmp(void *gomp_parallel) {
#ifdef KV_HF_OWN_THREADS /* for a sanitizer of threads, which does not see how OpenMP's threads wait for each other */
    gomp_parallel = NULL;
#endif
    openmp_region = (Region)gomp_parallel;
}

void kv_hf_parallel(Task task, void *context, int64_t tasks, int64_t threads) {
    if (threads <= 1 || tasks <= 1) {
        for (int64_t i = 0; i < tasks; i++) task(context, i);
        return;
    }
    Job job = {.task = task, .context = context, .tasks = tasks};
    if (openmp_region)
        openmp_region(run, &job, (unsigned)threads, 0); /* as many as torch takes: another number would end some of them */
    else
        run_on_own_threads(&job, threads);
}
